"""The settings of the batch filter, ``batch_filter.*``.

A ``PPOFilterConfig`` is consistent: every field has its type and range, ``min_group_size`` is filled in, and no
combination could train a group below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, fields
from typing import Any

from goldilocks.errors import refuse, refuse_unknown, require

STRATEGIES = ("uniform", "efficiency", "efficiency_stochastic", "max_variance")
GATE1_MODES = ("mean", "abs")
INVALID_ROWS = ("error", "drop")
OF_LIBRARY_CALLS = ("gate_always", "varying_group_sizes")  # a trainer sets these by itself
INSTEAD_OF_LIBRARY_CALLS = (
    "for library calls alone: a trainer judges every group, and knows the size that each was given"
)
# A switch in guides to this filter, by which a trainer sets the length that groups are rejected by.
REJECTION_SAMPLE = "rejection_sample"
INSTEAD_OF_REJECTION_SAMPLE = (
    "no such switch; batch_filter.max_response_length=N rejects groups all of whose answers have N tokens, the usual N "
    "being data.max_response_length, and remove_clip with min_rollout_n those with too few shorter ones"
)
_ROUNDING = 1e-9  # 10 × 1.1 is 11, not the 11.000000000000002 that would round up to 12
Check = tuple[Callable[[Any], bool], str]  # whether a value is accepted, and what would be


@dataclass(frozen=True)
class PPOFilterConfig:
    """Every field of ``batch_filter.*``; the comment beside a field says what it means."""

    sample_selection_strategy: str = "efficiency_stochastic"  # how a group with too many samples is cut
    selection_temperature: float = 0.25  # efficiency_stochastic: 0+ always takes the best, large is uniform

    target_group_size: int = 16  # samples a trained group has at most; the trainer sets it to rollout.n
    target_num_groups: int | None = None  # groups a batch has at most; None keeps every valid one
    min_group_size: int = None  # type: ignore[assignment]  # smaller groups are dropped; None becomes target_group_size // 2 + 1
    varying_group_sizes: bool = False  # groups were given unlike numbers of samples: one with all of its own is whole

    reward_threshold: float | None = None  # samples below it are dropped
    max_response_length: int | None = None  # a group all of whose samples reach it is dropped; never a sample
    remove_clip: bool = False  # also drop groups with fewer than min_rollout_n samples under max_response_length
    min_rollout_n: int = 1  # see remove_clip
    reject_low_variance_groups: bool = True  # unbiased std of the rewards below 1e-3
    invalid_rows: str = "error"  # a NaN or infinite reward, an empty response: "error", or "drop" and count

    enable_two_gate_filter: bool = False  # reject rows on which trainer and rollout engine disagree
    gate1_bias_epsilon: float = 0.01  # gate 1 keeps |mean over tokens of old − rollout log-prob| below this
    gate1_mode: str = "mean"  # "abs": the mean of |old − rollout|, in which opposite errors do not cancel
    gate2_instability_threshold: float = -15.0  # gate 2 keeps min over tokens of rollout − top log-prob above this
    gate_always: bool = False  # judge every group, also where none has more samples than the target

    prompt_oversampling_factor: float = 1.0  # prompts rolled out per prompt trained
    sample_oversampling_factor: float = 1.0  # rollouts made per rollout trained

    rejection_sample: InitVar[Any] = None  # no field: it is taken so that it can be answered

    def __post_init__(self, rejection_sample: Any) -> None:
        key = f"batch_filter.{REJECTION_SAMPLE}"
        require(rejection_sample is None, key, rejection_sample, INSTEAD_OF_REJECTION_SAMPLE)
        for name, (accepts, accepted) in _ACCEPTED.items():
            value = getattr(self, name)
            require(accepts(value), f"batch_filter.{name}", value, accepted)
        size, least, floor = self.target_group_size, self.min_group_size, self.target_group_size // 2 + 1
        if least is None:
            object.__setattr__(self, "min_group_size", floor)
        rejects, limit = self.reject_low_variance_groups, self.max_response_length
        if least is not None and rejects:
            accepted = f"{floor} to {size}, more than half of target_group_size={size}, or half of a group is padding; "
            accepted += "any size up to it with reject_low_variance_groups=False"
            require(floor <= least <= size, "batch_filter.min_group_size", least, accepted)
        elif least is not None:
            require(least <= size, "batch_filter.min_group_size", least, f"1 to target_group_size={size}")
        accepted = "False with target_group_size=1: a group of one has no variance, and none would be kept"
        require(size > 1 or not rejects, "batch_filter.reject_low_variance_groups", rejects, accepted)
        bounded = limit is not None or not self.remove_clip
        require(bounded, "batch_filter.max_response_length", limit, "an integer with remove_clip=True")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PPOFilterConfig:
        """Return the config of a ``dict`` or an OmegaConf node; an unknown key is an error."""
        cls.refuse_unknown_keys(values)
        return cls(**{str(key): value for key, value in values.items()})

    @classmethod
    def refuse_unknown_keys(cls, values: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for a key that is no field."""
        if REJECTION_SAMPLE in values:
            refuse(f"batch_filter.{REJECTION_SAMPLE}", values[REJECTION_SAMPLE], INSTEAD_OF_REJECTION_SAMPLE)
        refuse_unknown("batch_filter", map(str, values), [field.name for field in fields(cls)])

    @property
    def rollouts_to_generate(self) -> int:
        """How many rollouts of each prompt to make, so that the target is left after cutting."""
        return math.ceil(self.target_group_size * self.sample_oversampling_factor - _ROUNDING)

    def prompts_to_generate(self, prompts: int) -> int:
        """Return how many prompts to roll out, so that ``prompts`` are left after choosing."""
        return math.ceil(prompts * self.prompt_oversampling_factor - _ROUNDING)

    def groups_to_keep(self, groups: int) -> int:
        """Return how many of ``groups`` may be trained: the inverse of ``prompts_to_generate`` unless stated."""
        if self.target_num_groups is not None:
            return self.target_num_groups
        return math.floor(groups / self.prompt_oversampling_factor + _ROUNDING)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _optional(check: Check) -> Check:
    return (lambda value: value is None or check[0](value)), f"{check[1]}, or null"


def _one_of(names: tuple[str, ...]) -> Check:
    return (lambda value: value in names), f"one of {', '.join(names)}"


_COUNT: Check = (lambda value: type(value) is int and value >= 1), "an integer of at least 1"
_BOOLEAN: Check = (lambda value: isinstance(value, bool)), "true or false"
_NUMBER: Check = _is_number, "a finite number"
_POSITIVE: Check = (lambda value: _is_number(value) and value > 0), "a number above 0"
_FACTOR: Check = (lambda value: _is_number(value) and value >= 1), "a number of at least 1"

_ACCEPTED: dict[str, Check] = {
    "sample_selection_strategy": _one_of(STRATEGIES),
    "selection_temperature": _POSITIVE,
    "target_group_size": _COUNT,
    "target_num_groups": _optional(_COUNT),
    "min_group_size": _optional(_COUNT),
    "varying_group_sizes": _BOOLEAN,
    "reward_threshold": _optional(_NUMBER),
    "max_response_length": _optional(_COUNT),
    "remove_clip": _BOOLEAN,
    "min_rollout_n": _COUNT,
    "reject_low_variance_groups": _BOOLEAN,
    "invalid_rows": _one_of(INVALID_ROWS),
    "enable_two_gate_filter": _BOOLEAN,
    "gate1_bias_epsilon": _POSITIVE,
    "gate1_mode": _one_of(GATE1_MODES),
    "gate2_instability_threshold": _NUMBER,
    "gate_always": _BOOLEAN,
    "prompt_oversampling_factor": _FACTOR,
    "sample_oversampling_factor": _FACTOR,
}
