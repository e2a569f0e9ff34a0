"""The prompts of a table, verl's data frame or TRL's data set: keys, texts, and columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np

from goldilocks.hashing import content_key
from goldilocks.types import Prompt


class TablePrompts(ABC):
    """A ``Source`` of prompts by their index. The key is a hash of the messages, the same for every trainer."""

    table: Any  # None where the data set has none

    def __init__(self, size: int) -> None:
        self._keys = np.fromiter(map(content_key, self.contents()), dtype=np.uint64, count=size)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int, /) -> Prompt:
        return Prompt(key=int(self._keys[index]), index=index)

    def keys(self) -> np.ndarray:
        return self._keys

    def contents(self) -> Iterable[Any]:
        """What a prompt's key is a hash of."""
        return self.messages()

    @abstractmethod
    def messages(self) -> Iterable[Any]:
        """The chat messages of each prompt, or its text."""

    def texts(self) -> list[str]:
        """The text of each prompt's messages, for features."""
        return list(map(conversation_text, self.messages()))

    def column(self, name: str, key: str) -> list[Any]:
        """A column of the table; ``key`` is the setting that names it."""
        return column(self.table, name, key)


def column(table: Any, name: str, key: str) -> list[Any]:
    """Return a column of the table, or of its ``extra_info``; ``key`` is the setting that names it."""
    columns = list(getattr(table, "column_names", ()))
    if name in columns:
        return list(table[name])
    infos = table["extra_info"] if "extra_info" in columns else []
    if any(name in (info or {}) for info in infos):
        return [(info or {}).get(name) for info in infos]
    known = ", ".join(sorted({*columns, *(one for info in infos for one in info or {})}))
    raise ValueError(f"{key}={name!r} is not accepted: a column of the data: {known}")


def conversation_text(messages: Any) -> str:
    """Return the contents of a conversation's messages, a line each."""
    if isinstance(messages, str):
        return messages
    return "\n".join(str(message.get("content")) for message in messages)
