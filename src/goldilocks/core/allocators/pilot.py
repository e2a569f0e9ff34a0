"""A few rollouts first; the rest only where the first few say that there is something to learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from goldilocks.core.allocators.base import Allocator
from goldilocks.core.ledger import Ledger
from goldilocks.errors import require
from goldilocks.types import Group, mean_and_std


@dataclass
class Pilot(Allocator):
    """``n_pilot``, and ``n_commit`` more if the pilots' mean reward is inside (lo, hi), both ends excluded."""

    n_pilot: int = 4
    n_commit: int = 12
    lo: float = 0.0
    hi: float = 1.0

    def __post_init__(self) -> None:
        require(self.n_pilot >= 2, "allocator.n_pilot", self.n_pilot, "2 or more rollouts")
        require(self.n_commit >= 1, "allocator.n_commit", self.n_commit, "1 or more rollouts")
        require(self.lo < self.hi, "allocator.lo", self.lo, f"a mean reward below hi={self.hi}")

    def first(self, rows: np.ndarray, ledger: Ledger) -> Sequence[int]:
        return [self.n_pilot] * len(rows)

    def wanted(self, group: Group, ledger: Ledger) -> int:
        if len(group) < self.n_pilot:
            return self.n_pilot
        mean, _ = mean_and_std(group.rewards[: self.n_pilot])
        return self.n_pilot + self.n_commit if self.lo < mean < self.hi else self.n_pilot
