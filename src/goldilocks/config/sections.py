"""The sections of a user's config, as the dataclasses that have their keys and defaults, and how one is read."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar, get_origin, get_type_hints

from goldilocks.core.limits import Budget
from goldilocks.core.strata import StrataSettings
from goldilocks.dotted_keys import value_at
from goldilocks.errors import refuse_unknown, require, require_type
from goldilocks.types import POSITIVE_THRESHOLD, REWARD, Cost, Word

S = TypeVar("S")

REWARDS = "goldilocks.rewards"


@dataclass(frozen=True)
class FilterGroups:
    """``algorithm.filter_groups``: dynamic sampling."""

    enable: bool = False
    metric: str | None = REWARD  # as unnamed: acc where the reward function returns it, else the reward
    max_num_gen_batches: int = 0
    max_inflight_gen_batches: int = 1  # verl's key: here it is 1, and data.gen_batch_size bounds generation
    min_std: float | None = None  # None: MIN_STD; of the final reward, how much its penalties alone vary
    on_exhausted: str = "error"
    max_carry_steps: int = 1
    on_full: str = "finish"


@dataclass(frozen=True)
class AdaptiveRollout:
    """``adaptive_rollout``: as many rollouts as a prompt needs."""

    enable: bool = False
    max_n: int = 128
    rollouts_per_batch: int = 8
    positive_threshold: float = POSITIVE_THRESHOLD
    min_rollouts: int = 2
    stop: str = "positive"
    balance: int = 2
    max_train_n: int | None = None


class OnFailure(Word):
    """What becomes of an answer whose reward function has failed for the last time."""

    FAIL = "fail"  # its rollout fails, and is asked for again (goldilocks.max_retries)
    ZERO = "zero"  # the function's score is 0
    ERROR = "error"  # the run ends


@dataclass(frozen=True)
class WeightedReward:
    """One of ``goldilocks.rewards.functions``."""

    path: str | None = None  # None: the function that the run has without the section
    name: str = "compute_score"
    weight: float = 1.0
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardCalls:
    """``goldilocks.rewards``. With every default, functions are called as without the section."""

    functions: Mapping[str, Any] | None = None  # each a WeightedReward once it is read
    concurrency: int | None = None
    timeout: float | None = None
    retries: int = 0
    backoff: float = 1.0
    on_failure: str = str(OnFailure.FAIL)

    def __post_init__(self) -> None:
        OnFailure.parse(f"{REWARDS}.on_failure", self.on_failure)
        for name, least in (("concurrency", 1), ("retries", 0), ("backoff", 0.0)):
            value = getattr(self, name)
            require(value is None or value >= least, f"{REWARDS}.{name}", value, f"{least:g} or more")
        require(self.timeout is None or self.timeout > 0, f"{REWARDS}.timeout", self.timeout, "above 0, or null")
        for name in self.functions or {}:
            accepted = f"another name: {name} is the weighted sum of all"
            require(name not in ("score", "reward"), f"{REWARDS}.functions", name, accepted)

    @property
    def in_use(self) -> bool:
        """Whether any key of the section is set."""
        return self != RewardCalls()


@dataclass(frozen=True)
class Policies:
    """``goldilocks``: policies by name or as ``package.module:Class``, each with its parameters."""

    selector: str = "uniform"
    selector_kwargs: Mapping[str, Any] = field(default_factory=dict)
    allocator: str | None = None
    allocator_kwargs: Mapping[str, Any] = field(default_factory=dict)
    filter: Any = None
    filter_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_rollouts_per_step: int | None = None
    max_tokens_per_step: int | None = None
    max_retries: int = 2
    cost: str = str(Cost.TOKENS)
    prior: str = "flat"
    strata: Mapping[str, Any] = field(default_factory=lambda: asdict(StrataSettings()))
    validate_by: Sequence[str] = field(default_factory=list)
    on_stale_weights: str = "warn"
    rewards: Mapping[str, Any] = field(default_factory=lambda: asdict(RewardCalls()))
    budget: Mapping[str, Any] = field(default_factory=lambda: asdict(Budget()))
    study: bool = False


def reward_calls(config: Mapping[str, Any]) -> RewardCalls:
    """Return ``goldilocks.rewards`` of a config, checked; trainers of verl's own have it too."""
    calls = read_section(RewardCalls, REWARDS, config)
    names = calls.functions or {}
    functions = {name: read_section(WeightedReward, f"{REWARDS}.functions.{name}", config) for name in names}
    return replace(calls, functions=functions or None)


_type_hints = functools.cache(get_type_hints)  # types are text in the source, which Python evaluates at each call


def read_section(cls: type[S], name: str, config: Mapping[str, Any], *, finite: bool = True) -> S:
    """Return a section of the config as its dataclass; an unknown key is an error that suggests the nearest."""
    hints = _type_hints(cls)  # type: ignore[arg-type]  # mypy: a generic type is not hashable
    given = value_at(config, name) or {}
    require_type(name, given, Mapping[str, Any])
    empty = {key for key, value in given.items() if value is None and get_origin(hints.get(key)) is Mapping}
    chosen = {key: value for key, value in given.items() if key not in empty | {"_target_"}}
    refuse_unknown(name, chosen, sorted(hints))
    for key, value in chosen.items():
        require_type(f"{name}.{key}", value, hints[key])
        bad = finite and isinstance(value, float) and not math.isfinite(value)
        require(not bad, f"{name}.{key}", value, "a finite number")
    return cls(**chosen)
