"""Filters: which groups are kept."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from goldilocks.core.policy import Policy, build, resolve
from goldilocks.errors import refuse_unknown, require
from goldilocks.types import KEEP, MIN_STD, POSITIVE_THRESHOLD, Group, Verdict, mean_and_std

KWARGS = "goldilocks.filter_kwargs"


class Filter(Policy):
    """Judges a group when its rollouts are in."""

    @abstractmethod
    def judge(self, group: Group) -> Verdict:
        """Keep or drop a group of at least one rollout; the reason for dropping becomes a metric."""


@dataclass
class Everything(Filter):
    """No filter."""

    def judge(self, group: Group) -> Verdict:
        return KEEP


@dataclass
class Variance(Filter):
    """The standard deviation of ``metric`` must be above ``min_std``: shaped rewards never give an exact zero.

    A group of one is kept: it has no variance to judge. ``positive_threshold`` tells too easy from too hard.
    """

    metric: str = "reward"
    min_std: float = MIN_STD
    positive_threshold: float = POSITIVE_THRESHOLD

    def __post_init__(self) -> None:
        require(self.min_std >= 0, f"{KWARGS}.min_std", self.min_std, "0 or more")

    def judge(self, group: Group) -> Verdict:
        mean, std = mean_and_std(group.values(self.metric))
        if len(group) == 1 or std > self.min_std:
            return KEEP
        return Verdict(False, "too_easy" if mean >= self.positive_threshold else "too_hard")


@dataclass
class Band(Filter):
    """The mean of ``metric`` must be inside (lo, hi), both ends excluded."""

    metric: str = "reward"
    lo: float = 0.0
    hi: float = 1.0

    def __post_init__(self) -> None:
        require(self.lo < self.hi, f"{KWARGS}.lo", self.lo, f"below hi={self.hi}")

    def judge(self, group: Group) -> Verdict:
        mean, _ = mean_and_std(group.values(self.metric))
        if self.lo < mean < self.hi:
            return KEEP
        return Verdict(False, "above_band" if mean >= self.hi else "below_band")


@dataclass
class Length(Filter):
    """At least ``min_finished`` rollouts must not be truncated, nor longer than ``max_tokens`` where that is set."""

    max_tokens: int | None = None
    min_finished: int = 1

    def __post_init__(self) -> None:
        bounded = self.max_tokens is None or self.max_tokens >= 1
        require(bounded, f"{KWARGS}.max_tokens", self.max_tokens, "1 or more, or null")
        require(self.min_finished >= 1, f"{KWARGS}.min_finished", self.min_finished, "1 or more")

    def judge(self, group: Group) -> Verdict:
        finished = sum(
            not rollout.truncated and (self.max_tokens is None or rollout.tokens <= self.max_tokens)
            for rollout in group.rollouts
        )
        return KEEP if finished >= self.min_finished else Verdict(False, "overlong")


class Chain(Filter):
    """Keeps what every filter keeps."""

    def __init__(self, filters: Sequence[Filter]) -> None:
        self.filters = tuple(filters)

    def judge(self, group: Group) -> Verdict:
        verdicts = (link.judge(group) for link in self.filters)
        return next((verdict for verdict in verdicts if not verdict.keep), KEEP)

    def state_dict(self) -> dict[str, Any]:
        return {"filters": [link.state_dict() for link in self.filters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for link, saved in zip(self.filters, state["filters"], strict=True):
            link.load_state_dict(saved)

    def metrics(self) -> dict[str, float]:
        return {name: value for link in self.filters for name, value in link.metrics().items()}


FILTERS: dict[str, type[Filter]] = {"everything": Everything, "variance": Variance, "band": Band, "length": Length}


def build_filter(name: str | Sequence[str], params: Mapping[str, Any] | None = None) -> Filter:
    """Return the filter of this name; several names make a chain, in which each filter takes the parameters it has."""
    given = params or {}
    if isinstance(name, str):
        return build("filter", name, given, FILTERS, Filter)  # type: ignore[type-abstract]
    classes = [resolve("filter", one, FILTERS, Filter) for one in name]  # type: ignore[type-abstract]
    known = [inspect.signature(cls).parameters for cls in classes]
    refuse_unknown("goldilocks.filter_kwargs", given, {key: None for keys in known for key in keys})
    chosen = ({key: value for key, value in given.items() if key in keys} for keys in known)
    return Chain([cls(**own) for cls, own in zip(classes, chosen, strict=True)])
