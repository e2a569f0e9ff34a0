"""How many visits to each prompt were issued: the number of a visit, by which its sampling noise is seeded.

Visits are counted when they are issued, not when they are judged: two visits to one prompt that are open at the same
time have different numbers, and so different noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from goldilocks.core.source import KeyedPositions


class IssuedVisits:
    """A count per prompt, in one flat array."""

    def __init__(self, keys: np.ndarray) -> None:
        self._keys = keys
        self._counts = np.zeros(len(keys), dtype=np.uint32)

    def number(self, index: int) -> int:
        """Count a visit that is issued now; return how many were issued before it."""
        before = int(self._counts[index])
        self._counts[index] += 1
        return before

    def count_judged(self, visits: np.ndarray) -> None:
        """Begin with the visits that were judged: a state of an earlier version has no other count."""
        self._counts[:] = visits

    def state_dict(self) -> dict[str, Any]:
        """Only prompts that were visited: the file grows with the run, not with the data set."""
        rows = np.flatnonzero(self._counts)
        return {"keys": self._keys[rows], "rows": rows, "counts": self._counts[rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Counts find their prompts by key; those whose prompt is gone from the data are let go."""
        rows = KeyedPositions(self._keys).find(state["keys"], state["rows"])
        self._counts[:] = 0
        self._counts[rows[rows >= 0]] = np.asarray(state["counts"])[rows >= 0]
