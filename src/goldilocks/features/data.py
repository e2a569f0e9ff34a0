"""What features are made of, read from a table of prompts: verl's data frame or TRL's data set."""

from __future__ import annotations

from typing import Any


def conversation_text(messages: Any) -> str:
    """Return what the messages of a conversation say, one after the other."""
    if isinstance(messages, str):
        return messages
    return "\n".join(str(message.get("content")) for message in messages)


def column(table: Any, name: str, key: str) -> list[Any]:
    """Return a column of the table, or of its ``extra_info``; ``key`` is the setting that names it."""
    columns = list(getattr(table, "column_names", ()))
    if name in columns:
        return list(table[name])
    infos = table["extra_info"] if "extra_info" in columns else []
    if any(name in (info or {}) for info in infos):
        return [(info or {}).get(name) for info in infos]
    there = sorted({*columns, *(one for info in infos for one in info or {})})
    raise ValueError(f"{key}: the data have no column {name!r}; there are {', '.join(there)}")
