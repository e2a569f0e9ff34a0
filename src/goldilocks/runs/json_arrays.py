"""JSON for nested values with arrays in them: one walker for every file that a checkpoint has.

A value that JSON lacks is stored elsewhere, and an object with one key, a mark, stands for it in the JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

ARRAY, PAIRS = "__array__", "__pairs__"

Leaf = Callable[[Any], Any]


def to_json(value: Any, leaf: Leaf, marks: Mapping[str, object]) -> Any:
    """Return JSON for dicts, lists and plain values; ``leaf`` returns the JSON of any other value.

    JSON has text keys only, and a key of the user's may be one of ``marks``: such a dict becomes a list of pairs.
    """
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != PAIRS and key not in marks for key in value):
            return {key: to_json(item, leaf, marks) for key, item in value.items()}
        return {PAIRS: [[to_json(one, leaf, marks) for one in pair] for pair in value.items()]}
    if isinstance(value, (list, tuple)):
        return [to_json(item, leaf, marks) for item in value]
    return value if value is None or isinstance(value, (str, bool, int, float)) else leaf(value)


def from_json(value: Any, marks: Mapping[str, Leaf]) -> Any:
    """Return what ``to_json`` was given; a mark's function returns the value that the mark stands for."""
    if isinstance(value, list):
        return [from_json(item, marks) for item in value]
    if not isinstance(value, dict):
        return value
    mark: str = next(iter(value)) if len(value) == 1 else ""
    if mark == PAIRS:
        return {from_json(key, marks): from_json(item, marks) for key, item in value[PAIRS]}
    if mark in marks:
        return marks[mark](value[mark])
    return {key: from_json(item, marks) for key, item in value.items()}
