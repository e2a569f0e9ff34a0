"""The prompts a selector chooses from: a shuffled pass over all of them, which are in hand, and the visits to each.

The order of an epoch is a function of the epoch alone, so the cursor is its only state. The number of a visit seeds its
sampling noise. Visits are counted when they are issued, not when they are judged: two visits to one prompt that are
open at the same time have different numbers, and so different noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from goldilocks.core.source import KeyedPositions


class PromptOrder:
    """Indices into the source. ``next`` goes through them in shuffled order; ``free`` returns all not in hand."""

    def __init__(self, size: int, *, seed: int, repeat: bool, order: Callable[[int], np.ndarray] | None = None) -> None:
        """``order`` returns the pass of each epoch; default: a permutation seeded by ``seed`` and the epoch."""
        self.size = size
        self.epoch = 0
        self._position = 0
        self._order_of = order or (lambda epoch: np.random.default_rng([seed, epoch]).permutation(size))
        self._repeat = repeat
        self._held = np.zeros(size, dtype=np.uint16)
        self._order = self._order_of(self.epoch)

    def next(self, k: int) -> np.ndarray:
        """Return the next ``k`` of the pass; a new pass begins where it ends. Fewer when prompts may not repeat."""
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
        """Return every index that is not in hand; without repeats, every index never handed out."""
        return np.flatnonzero(self._held == 0)

    def claim(self, chosen: Iterable[int]) -> None:
        for index in chosen:
            self._held[index] += 1

    def release(self, index: int) -> None:
        """Mark an index as no longer in hand; without repeats it stays claimed for good."""
        if self._repeat:
            self._held[index] -= 1

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor and, without repeats, the prompts handed out. Holders of prompts claim them on loading."""
        spent = np.empty(0, dtype=np.int64) if self._repeat else np.flatnonzero(self._held)
        return {"epoch": self.epoch, "position": self._position, "spent": spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self.epoch)
        self._held[:] = 0
        self._held[np.asarray(state["spent"], dtype=np.int64)] = 1


class IssuedVisits:
    """How many visits to each prompt were issued, in one flat array."""

    def __init__(self, keys: np.ndarray) -> None:
        self._keys = keys
        self._counts = np.zeros(len(keys), dtype=np.uint32)

    def number(self, index: int) -> int:
        """Count a visit that is issued now; return how many were issued before it."""
        before = int(self._counts[index])
        self._counts[index] += 1
        return before

    def count_judged(self, visits: np.ndarray) -> None:
        """Start from the judged visits: a state of an earlier version has no other count."""
        self._counts[:] = visits

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of visited prompts only: the file grows with the run, not with the data set."""
        rows = np.flatnonzero(self._counts)
        return {"keys": self._keys[rows], "rows": rows, "counts": self._counts[rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Find the prompt of each count by key; drop counts whose prompt is gone from the data."""
        rows = KeyedPositions(self._keys).find(state["keys"], state["rows"])
        self._counts[:] = 0
        self._counts[rows[rows >= 0]] = np.asarray(state["counts"])[rows >= 0]
