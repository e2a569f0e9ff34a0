"""Keeps groups whose answers differ: all right, or all wrong, has no gradient."""

from __future__ import annotations

from dataclasses import dataclass

from goldilocks.core.filters.base import Filter
from goldilocks.errors import require
from goldilocks.types import KEEP, Group, Verdict, mean_and_std


@dataclass
class Variance(Filter):
    """The standard deviation of ``metric`` must be above ``min_std``: shaped rewards never give an exact zero.

    A group of one is kept: nothing can be said of its variance. ``positive_threshold`` tells too easy from too hard.
    """

    metric: str = "reward"
    min_std: float = 1e-6
    positive_threshold: float = 0.5

    def __post_init__(self) -> None:
        require(self.min_std >= 0, "filter.min_std", self.min_std, "0 or more")

    def judge(self, group: Group) -> Verdict:
        mean, std = mean_and_std(group.values(self.metric))
        if len(group) == 1 or std > self.min_std:
            return KEEP
        return Verdict(False, "too_easy" if mean >= self.positive_threshold else "too_hard")
