"""Prompts that were chosen and are not yet open, each with how many rollouts to ask for at first.

The selector and the allocator are consulted once for each generation batch. A cancelled prompt returns to the head.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from goldilocks.core.allocators import Allocator
from goldilocks.core.beliefs import Beliefs
from goldilocks.core.prompt_order import PromptOrder
from goldilocks.core.selectors import Selector
from goldilocks.core.source import KeyedPositions


class PromptQueue:
    """Hands out ``(index, n)``: a prompt and how many rollouts to ask for at first."""

    def __init__(
        self, order: PromptOrder, selector: Selector, allocator: Allocator, beliefs: Beliefs, *, batch: int, seed: int
    ) -> None:
        self._order = order
        self._selector = selector
        self._allocator = allocator
        self._beliefs = beliefs
        self._batch = batch
        self._rng = np.random.default_rng(seed)
        self._waiting: deque[tuple[int, int]] = deque()

    def head(self) -> tuple[int, int] | None:
        """Return the next prompt without removing it; None when there are no more."""
        if not self._waiting:
            self._choose()
        return self._waiting[0] if self._waiting else None

    @property
    def indices(self) -> list[int]:
        return [index for index, _ in self._waiting]

    def pop(self) -> tuple[int, int]:
        return self._waiting.popleft()

    def put_back(self, index: int, n: int) -> None:
        """Visit a prompt next, because its visit was cancelled."""
        self._waiting.appendleft((index, n))

    def _choose(self) -> None:
        rows = self._selector.choose(self._order, self._beliefs, self._batch, self._rng)
        sizes = self._allocator.first(rows, self._beliefs)
        if len(sizes) != len(rows) or any(n < 1 for n in sizes):
            name = type(self._allocator).__name__
            raise ValueError(f"{name}.first gave {list(sizes)} for {len(rows)} prompts; accepted: 1 or more for each")
        chosen = [int(row) for row in rows]
        self._order.claim(chosen)
        self._waiting.extend(zip(chosen, sizes, strict=True))

    def state_dict(self) -> dict[str, Any]:
        keys = self._beliefs.keys
        waiting = [(index, n, int(keys[index])) for index, n in self._waiting]
        return {"rng": self._rng.bit_generator.state, "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Prompts that are gone from the data are dropped."""
        self._rng.bit_generator.state = state["rng"]
        positions = KeyedPositions(self._beliefs.keys)
        found = ((positions.find_one(key, index), n) for index, n, key in state["waiting"])
        self._waiting = deque((index, n) for index, n in found if index >= 0)
