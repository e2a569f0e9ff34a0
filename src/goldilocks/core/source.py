"""Where prompts come from: random access by index, and a key for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from goldilocks.hashing import content_key
from goldilocks.types import Prompt


class Source(Protocol):
    """Anything with a length, prompts by index, and their keys as one array (read once, at the start)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt: ...

    def keys(self) -> np.ndarray: ...


class ListSource:
    """Prompts from a sequence of contents; the key is a hash of the content.

    ``readable``: the contents are what the prompts say, and not only names for them. ``columns`` say more of each.
    """

    def __init__(
        self, contents: Sequence[Any], *, readable: bool = True, columns: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        self._contents = contents
        self._readable = readable
        self._columns = dict(columns or {})
        self._keys = np.fromiter((content_key(content) for content in contents), dtype=np.uint64, count=len(contents))

    def __len__(self) -> int:
        return len(self._contents)

    def __getitem__(self, index: int, /) -> Prompt:
        return Prompt(key=int(self._keys[index]), index=index, payload=self._contents[index])

    def keys(self) -> np.ndarray:
        return self._keys

    def texts(self) -> list[str]:
        """What the prompts say, for features of them; empty texts if the contents are only names."""
        if not self._readable:
            return [""] * len(self)
        return [content if isinstance(content, str) else str(content) for content in self._contents]

    def column(self, name: str, key: str) -> list[Any]:
        """A column; ``key`` is the setting that names it."""
        if name not in self._columns:
            there = ", ".join(self._columns) or "none"
            raise ValueError(f"{key}: the data have no column {name!r}; there are {there}")
        return list(self._columns[name])


class KeyedPositions:
    """Finds where a remembered prompt stands in this run's source, though the data may have been reordered since."""

    def __init__(self, keys: np.ndarray) -> None:
        self._keys = keys
        self._order: np.ndarray | None = None

    def find(self, keys: np.ndarray, hints: np.ndarray) -> np.ndarray:
        """The index of each key, its hint where that still holds; -1 for a prompt that is gone."""
        keys = np.asarray(keys, dtype=np.uint64)
        found = np.asarray(hints, dtype=np.int64).copy()
        inside = (found >= 0) & (found < len(self._keys))
        right = inside.copy()
        right[inside] = self._keys[found[inside]] == keys[inside]
        if not right.all():
            found[~right] = self._search(keys[~right])
        return found

    def find_one(self, key: int, hint: int) -> int:
        """The same for one prompt."""
        return int(self.find(np.array([key], dtype=np.uint64), np.array([hint]))[0])

    def _search(self, keys: np.ndarray) -> np.ndarray:
        if not len(self._keys):
            return np.full(len(keys), -1)
        if self._order is None:
            self._order = np.argsort(self._keys, kind="stable")
        places = np.minimum(np.searchsorted(self._keys, keys, sorter=self._order), len(self._keys) - 1)
        candidates = self._order[places]
        return np.where(self._keys[candidates] == keys, candidates, -1)


def find_prompt(source: Source, positions: KeyedPositions, packed: Mapping[str, Any]) -> Prompt:
    """Return the prompt that a saved group is about; an error if it is gone from the data."""
    place = positions.find_one(packed["key"], packed["index"])
    if place < 0:
        raise ValueError(
            f"group {packed['uid']} of the saved state is about a prompt (key {packed['key']}) "
            f"that is not among the {len(source)} prompts of this data set"
        )
    return source[place]
