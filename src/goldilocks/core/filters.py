"""Filters: which groups are kept. Before them the base of every policy (filters, allocators, selectors).

A policy of ours has a name, a user's own is ``package.module:Class``.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from goldilocks.errors import refuse_unknown, require, require_known, require_type
from goldilocks.types import KEEP, MIN_STD, OUTCOME, POSITIVE_THRESHOLD, REWARD, Group, Verdict, mean_and_std

P = TypeVar("P", bound="Policy")

KWARGS = "goldilocks.filter_kwargs"


# -- every policy ------------------------------------------------------------------------------------------------------


class Policy(ABC):  # noqa: B024  # each family adds its own abstract methods
    """Parameters that are checked, state that can be saved, metrics. A policy without state inherits these methods."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changed since construction, as JSON values and numpy arrays."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # a policy without state loads nothing
        """Continue from a state that ``state_dict`` returned."""

    def metrics(self) -> dict[str, float]:
        """Return what to log of this policy, under its own names."""
        return {}


def build(kind: str, name: str, params: Mapping[str, Any], named: Mapping[str, type[P]], base: type[P]) -> P:
    """Return the policy of this name with these parameters; ``named`` are ours of its kind, ``base`` their class."""
    cls = resolve(kind, name, named, base)
    refuse_unknown(f"goldilocks.{kind}_kwargs", params, inspect.signature(cls).parameters)
    if name in named:  # a policy of ours checks the range of its numbers; that they are numbers is checked here
        hints = get_type_hints(cls.__init__)
        for key, value in params.items():
            require_type(f"goldilocks.{kind}_kwargs.{key}", value, hints.get(key))
    try:
        return cls(**params)
    except ValueError:
        raise  # a policy's own message, with its key and what it accepts
    except Exception as error:
        raise ValueError(f"goldilocks.{kind}={name!r} cannot be made: {type(error).__name__}: {error}") from error


def resolve(kind: str, name: str, named: Mapping[str, type[P]], base: type[P]) -> type[P]:
    """Return the class of a policy, ours or the user's own."""
    if ":" not in name:
        require_known(f"goldilocks.{kind}", name, named, "or package.module:Class")
        return named[name]
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"goldilocks.{kind}={name!r} cannot be imported: {error}") from error
    fits = isinstance(found, type) and issubclass(found, base)
    require(fits, f"goldilocks.{kind}", name, f"a subclass of {base.__module__}.{base.__name__}")
    return found  # type: ignore[no-any-return]


# -- filters -----------------------------------------------------------------------------------------------------------


class Filter(Policy):
    """Judges a group when its rollouts are in."""

    @abstractmethod
    def judge(self, group: Group) -> Verdict:
        """Keep or drop a group of at least one rollout; the reason for dropping becomes a metric."""

    def reads(self) -> set[str]:
        """Return the metrics, beside the reward, without which a rollout cannot be judged."""
        return set()


@dataclass
class Everything(Filter):
    """No filter."""

    def judge(self, group: Group) -> Verdict:
        return KEEP


@dataclass
class Variance(Filter):
    """The standard deviation of ``metric`` must be above ``min_std``: shaped rewards never give an exact zero.

    ``metric`` None: ``acc`` where the reward function returns it, else the reward. A shaped reward differs among
    answers that are all wrong, and a filter on it would train their length. A group of one has no contrast, and is
    dropped. ``positive_threshold`` tells too easy from too hard.
    """

    metric: str | None = None
    min_std: float = MIN_STD
    positive_threshold: float = POSITIVE_THRESHOLD

    def __post_init__(self) -> None:
        require(self.min_std >= 0, f"{KWARGS}.min_std", self.min_std, "0 or more")

    def judge(self, group: Group) -> Verdict:
        if len(group) == 1:
            return Verdict(False, "single")
        mean, std = mean_and_std(group.values(self.metric))
        if std > self.min_std:
            return KEEP
        return Verdict(False, "too_easy" if mean >= self.positive_threshold else "too_hard")

    def reads(self) -> set[str]:
        return {self.metric or OUTCOME} - {REWARD}


@dataclass
class Band(Filter):
    """The share of passes, ``metric`` ≥ ``positive_threshold``, must be inside (lo, hi), both ends excluded."""

    metric: str | None = None
    lo: float = 0.0
    hi: float = 1.0
    positive_threshold: float = POSITIVE_THRESHOLD

    def __post_init__(self) -> None:
        require(self.lo < self.hi, f"{KWARGS}.lo", self.lo, f"below hi={self.hi}")

    def judge(self, group: Group) -> Verdict:
        passes = [value >= self.positive_threshold for value in group.values(self.metric)]
        share = sum(passes) / len(passes)
        if self.lo < share < self.hi:
            return KEEP
        return Verdict(False, "above_band" if share >= self.hi else "below_band")

    def reads(self) -> set[str]:
        return {self.metric or OUTCOME} - {REWARD}


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

    def reads(self) -> set[str]:
        return set().union(*(link.reads() for link in self.filters))

    def state_dict(self) -> dict[str, Any]:
        return {"filters": [(type(link).__name__, link.state_dict()) for link in self.filters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for link, (name, saved) in zip(self.filters, state["filters"], strict=False):
            if name == type(link).__name__:  # else a run goes on with another chain
                link.load_state_dict(saved)

    def metrics(self) -> dict[str, float]:
        return {name: value for link in self.filters for name, value in link.metrics().items()}


FILTERS: dict[str, type[Filter]] = {"everything": Everything, "variance": Variance, "band": Band, "length": Length}


def build_filter(
    name: str | Sequence[str], params: Mapping[str, Any] | None = None, shared: Mapping[str, Any] | None = None
) -> Filter:
    """Return the filter of this name; several names make a chain, in which each filter takes the parameters it has.

    ``shared`` are values of the run for filters that have such a parameter and are not given another.
    """
    names = [name] if isinstance(name, str) else list(name)
    classes = [resolve("filter", one, FILTERS, Filter) for one in names]  # type: ignore[type-abstract]
    known = [inspect.signature(cls).parameters for cls in classes]
    given = dict(params or {})
    refuse_unknown("goldilocks.filter_kwargs", given, {key: None for keys in known for key in keys})
    links = []
    for one, keys in zip(names, known, strict=True):
        own = {key: value for key, value in {**(shared or {}), **given}.items() if key in keys}
        links.append(build("filter", one, own, FILTERS, Filter))  # type: ignore[type-abstract]
    return links[0] if isinstance(name, str) else Chain(links)
