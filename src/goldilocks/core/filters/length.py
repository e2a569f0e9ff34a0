"""Drops groups with too few answers that came to an end."""

from __future__ import annotations

from dataclasses import dataclass

from goldilocks.core.filters.base import Filter
from goldilocks.errors import require
from goldilocks.types import KEEP, Group, Verdict


@dataclass
class Length(Filter):
    """At least ``min_finished`` rollouts must not be truncated, nor longer than ``max_tokens`` where that is set."""

    max_tokens: int | None = None
    min_finished: int = 1

    def __post_init__(self) -> None:
        require(
            self.max_tokens is None or self.max_tokens >= 1, "filter.max_tokens", self.max_tokens, "1 or more, or none"
        )
        require(self.min_finished >= 1, "filter.min_finished", self.min_finished, "1 or more")

    def judge(self, group: Group) -> Verdict:
        finished = sum(
            not rollout.truncated and (self.max_tokens is None or rollout.tokens <= self.max_tokens)
            for rollout in group.rollouts
        )
        return KEEP if finished >= self.min_finished else Verdict(False, "overlong")
