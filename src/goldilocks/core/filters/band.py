"""Keeps groups that are neither too hard nor too easy."""

from __future__ import annotations

from dataclasses import dataclass

from goldilocks.core.filters.base import Filter
from goldilocks.errors import require
from goldilocks.types import KEEP, Group, Verdict, mean_and_std


@dataclass
class Band(Filter):
    """The mean of ``metric`` must be inside (lo, hi), both ends excluded."""

    metric: str = "reward"
    lo: float = 0.0
    hi: float = 1.0

    def __post_init__(self) -> None:
        require(self.lo < self.hi, "filter.lo", self.lo, f"below hi={self.hi}")

    def judge(self, group: Group) -> Verdict:
        mean, _ = mean_and_std(group.values(self.metric))
        if self.lo < mean < self.hi:
            return KEEP
        return Verdict(False, "above_band" if mean >= self.hi else "below_band")
