"""Where prompts come from: random access by index, and a key for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from goldilocks.errors import require
from goldilocks.hashing import content_key
from goldilocks.types import Prompt


class Source(Protocol):
    """Anything with a length, prompts by index, and their keys as one array (read once, at the start)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt: ...

    def keys(self) -> np.ndarray: ...


class ListSource:
    """Prompts from a sequence of contents; the key is a hash of the content.

    ``readable``: the contents are the texts of the prompts, not only names for them. ``columns`` has further values of
    each prompt.
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
        """Return the texts of the prompts, for features; empty texts if the contents are only names."""
        return [str(content) if self._readable else "" for content in self._contents]

    def column(self, name: str, key: str) -> list[Any]:
        """Return a column; ``key`` is the setting that names it."""
        require(
            name in self._columns, key, name, f"a column of the data: {', '.join(self._columns) or 'there is none'}"
        )
        return list(self._columns[name])


class KeyedPositions:
    """Finds the row of a remembered prompt in this run's source. The data may have been reordered since."""

    def __init__(self, keys: np.ndarray) -> None:
        self._keys = keys
        self._order: np.ndarray | None = None

    def find(self, keys: np.ndarray, hints: np.ndarray) -> np.ndarray:
        """Return the index of each key: its hint where the hint still holds, -1 for a prompt that is gone."""
        keys = np.asarray(keys, dtype=np.uint64)
        found = np.asarray(hints, dtype=np.int64).copy()
        inside = (found >= 0) & (found < len(self._keys))
        right = inside.copy()
        right[inside] = self._keys[found[inside]] == keys[inside]
        if not right.all():
            found[~right] = self._search(keys[~right])
        return found

    def find_one(self, key: int, hint: int) -> int:
        return int(self.find(np.array([key], dtype=np.uint64), np.array([hint]))[0])

    def _search(self, keys: np.ndarray) -> np.ndarray:
        if not len(self._keys):
            return np.full(len(keys), -1)
        if self._order is None:
            self._order = np.argsort(self._keys, kind="stable")
        places = np.minimum(np.searchsorted(self._keys, keys, sorter=self._order), len(self._keys) - 1)
        candidates = self._order[places]
        return np.where(self._keys[candidates] == keys, candidates, -1)
