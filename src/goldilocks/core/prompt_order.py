"""The prompts a selector chooses from: a shuffled pass over all of them, and which are in hand already.

The order of an epoch is a function of the epoch alone, so the cursor is all the state there is.

How many visits to each prompt were issued: the number of a visit, by which its sampling noise is seeded.

Visits are counted when they are issued, not when they are judged: two visits to one prompt that are open at the same
time have different numbers, and so different noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from goldilocks.core.source import KeyedPositions


class PromptOrder:
    """Indices into the source. ``next`` goes through them in shuffled order; ``free`` is all that are not in hand."""

    def __init__(self, size: int, *, seed: int, repeat: bool, order: Callable[[int], np.ndarray] | None = None) -> None:
        """``order`` gives the pass of each epoch, where someone else shuffles."""
        self.size = size
        self.epoch = 0
        self._position = 0
        self._order_of = order or (lambda epoch: np.random.default_rng([seed, epoch]).permutation(size))
        self._repeat = repeat
        self._held = np.zeros(size, dtype=np.uint16)
        self._order = self._order_of(self.epoch)

    def next(self, k: int) -> np.ndarray:
        """The next ``k`` of the pass; a new one begins where it ends. Fewer when prompts may not repeat."""
        parts: list[np.ndarray] = []
        while k > 0:
            part = self._order[self._position : self._position + k]
            self._position += len(part)
            if not self._repeat:
                part = part[self._held[part] == 0]  # some were chosen from ``free`` before their turn
            k -= len(part)
            parts.append(part)
            if k > 0 and self._position >= len(self._order):  # a pass may leave prompts out
                if not self._repeat:
                    break
                self.epoch, self._position = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def free(self) -> np.ndarray:
        """Every index that is not in hand; without repeats, every index never handed out."""
        return np.flatnonzero(self._held == 0)

    def claim(self, chosen: Iterable[int]) -> None:
        """These are in hand now."""
        for index in chosen:
            self._held[index] += 1

    def release(self, index: int) -> None:
        """This one is no longer in hand; without repeats it stays claimed for good."""
        if self._repeat:
            self._held[index] -= 1

    def state_dict(self) -> dict[str, Any]:
        """The cursor and, without repeats, what was handed out. Whoever has a prompt in hand claims it on loading."""
        spent = np.empty(0, dtype=np.int64) if self._repeat else np.flatnonzero(self._held)
        return {"epoch": self.epoch, "position": self._position, "spent": spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self.epoch)
        self._held[:] = 0
        self._held[np.asarray(state["spent"], dtype=np.int64)] = 1


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
