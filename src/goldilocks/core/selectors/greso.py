"""Skips prompts whose last visits had no variance, and returns to them now and then.

After GRESO (arXiv 2506.02177): a prompt with a streak of s zero-variance visits is skipped with probability 1 − pˢ. The
exploration rate p moves by a fixed step: down while more of what comes back is without variance than ``target``, up
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from goldilocks.core.ledger import Ledger
from goldilocks.core.pool import Pool
from goldilocks.core.selectors.base import Selector
from goldilocks.errors import require
from goldilocks.types import Group


@dataclass
class Greso(Selector):
    """The shuffled pass, less the prompts skipped on the way."""

    target: float = 0.25
    p: float = 0.5
    step: float = 0.01
    p_min: float = 0.05
    p_max: float = 0.95
    _judged: int = field(default=0, init=False)
    _without_variance: int = field(default=0, init=False)
    _skipped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        require(0 < self.target < 1, "selector.target", self.target, "a share of zero-variance groups in (0, 1)")
        require(0 < self.p_min <= self.p <= self.p_max < 1, "selector.p", self.p, "in (0, 1), within p_min and p_max")
        require(0 <= self.step < 1, "selector.step", self.step, "in [0, 1)")

    def choose(self, pool: Pool, ledger: Ledger, k: int, rng: np.random.Generator) -> np.ndarray:
        self._move()
        chosen: list[int] = []
        for _ in range(0, pool.size, k):  # at most one epoch is skipped through: a data set of streaks is still used
            rows = pool.next(k - len(chosen))
            go = rng.random(len(rows)) < self.p ** ledger.streak[rows].astype(np.float64)
            chosen.extend(rows[go].tolist())
            self._skipped += int((~go).sum())
            if len(chosen) >= k or not len(rows):
                break
        return np.asarray(chosen if chosen else pool.next(k), dtype=np.int64)

    def learn(self, group: Group, *, informative: bool) -> None:
        self._judged += 1
        self._without_variance += not informative

    def _move(self) -> None:
        if self._judged:
            direction = 1 if self._without_variance / self._judged <= self.target else -1
            self.p = min(max(self.p + direction * self.step, self.p_min), self.p_max)
            self._judged = self._without_variance = 0

    def state_dict(self) -> dict[str, Any]:
        names = ("p", "_judged", "_without_variance", "_skipped")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def metrics(self) -> dict[str, float]:
        return {"selector/greso_p": self.p, "selector/greso_skipped": self._skipped}
