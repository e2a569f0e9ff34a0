"""Nested mappings, such as a configuration, by dotted keys (``data.train_batch_size``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, or None if there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def with_value(config: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of the mapping that has ``value`` at a dotted key."""
    first, _, rest = key.partition(".")
    inner = config.get(first)
    changed = with_value(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value
    return {**config, first: changed}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings as one; where both have a value, ``above`` wins."""
    both = dict(below)
    for key, value in above.items():
        known = both.get(key)
        both[key] = merged(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    return both


def dotted_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every value, sections included."""
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from dotted_keys(value, f"{prefix}{key}.")


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every dotted key that is no section."""
    found = {key: value_at(config, key) for key in dotted_keys(config)}
    return {key: value for key, value in found.items() if not isinstance(value, Mapping)}
