"""One budget over many prompts, spent where a further rollout is worth most per expected token.

N rollouts of a prompt with pass rate p are worth (1 − pᴺ − (1−p)ᴺ) · p(1−p)²: the chance that they differ, times a
weight that prefers hard prompts. That is concave in N, so taking the best next rollout, again and again, is optimal.

A generation batch may be small, so it competes not only within itself but with the beliefs of the last
``memory`` prompts: a lone hard prompt still gets more than a lone easy one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from goldilocks.core.allocators.base import Allocator
from goldilocks.core.ledger import Ledger
from goldilocks.errors import require
from goldilocks.types import Group


@dataclass
class Knapsack(Allocator):
    """On average ``mean_n`` rollouts a prompt, each between ``min_n`` and ``max_n``."""

    mean_n: int = 8
    min_n: int = 2
    max_n: int = 32
    memory: int = 256
    _recent: np.ndarray = field(default_factory=lambda: np.empty((0, 2)), init=False, repr=False)

    def __post_init__(self) -> None:
        require(self.min_n >= 2, "allocator.min_n", self.min_n, "2 or more rollouts")
        require(self.max_n >= self.min_n, "allocator.max_n", self.max_n, f"min_n={self.min_n} or more")
        fits = self.min_n <= self.mean_n <= self.max_n
        require(fits, "allocator.mean_n", self.mean_n, f"between min_n={self.min_n} and max_n={self.max_n}")
        require(self.memory >= 0, "allocator.memory", self.memory, "0 or more prompts")

    def first(self, rows: np.ndarray, ledger: Ledger) -> Sequence[int]:
        batch = np.column_stack([ledger.pass_rate(rows), ledger.expected_tokens(rows)]).astype(np.float64)
        rivals = np.concatenate([batch, self._recent])
        self._recent = rivals[: self.memory]
        return [int(n) for n in self._spend(rivals)[: len(rows)]]

    def _spend(self, rivals: np.ndarray) -> np.ndarray:
        p, tokens = rivals[:, :1], rivals[:, 1:]
        have = np.arange(self.min_n, self.max_n)  # the value of one more, when there are so many
        value = (p**have * (1 - p) + (1 - p) ** have * p) * p * (1 - p) ** 2 / tokens
        budget = (self.mean_n - self.min_n) * len(rivals)
        best = np.argsort(-value, axis=None, kind="stable")[:budget]
        return self.min_n + np.bincount(best // max(value.shape[1], 1), minlength=len(rivals))

    def wanted(self, group: Group, ledger: Ledger) -> int:
        return group.planned

    def state_dict(self) -> dict[str, Any]:
        return {"recent": self._recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = np.asarray(state["recent"], dtype=np.float64).reshape(-1, 2)
