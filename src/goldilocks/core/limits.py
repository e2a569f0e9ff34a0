"""The bounds a step is held to, and what happens to what is left over."""

from __future__ import annotations

import math
from dataclasses import dataclass

from goldilocks.core.statistics import KeepRate
from goldilocks.errors import require
from goldilocks.types import OnExhausted, OnFull

SLACK = 2.0  # standard deviations: a refill then nearly always suffices, and what it yields beyond is carried


@dataclass(frozen=True)
class Limits:
    """What one step may cost. None, or a ``max_num_gen_batches`` of 0 or less, is no limit.

    Nothing here is ever exceeded: tokens are not known before they are written, so ``max_tokens_per_step`` reserves
    ``max_tokens_per_rollout`` for each rollout in flight.
    """

    max_num_gen_batches: int = 0
    max_rollouts_per_step: int | None = None
    max_tokens_per_step: int | None = None
    max_tokens_per_rollout: int | None = None
    max_retries: int = 2
    on_exhausted: OnExhausted = OnExhausted.ERROR

    def __post_init__(self) -> None:
        for key in ("max_rollouts_per_step", "max_tokens_per_step", "max_tokens_per_rollout"):
            value = getattr(self, key)
            require(value is None or value > 0, f"limits.{key}", value, "a number above 0, or none for no limit")
        require(self.max_retries >= 0, "limits.max_retries", self.max_retries, "0 or more")
        object.__setattr__(self, "on_exhausted", OnExhausted.parse("limits.on_exhausted", self.on_exhausted))
        require(
            self.max_tokens_per_step is None or self.max_tokens_per_rollout is not None,
            "limits.max_tokens_per_rollout",
            self.max_tokens_per_rollout,
            "with max_tokens_per_step, the longest a rollout can be",
        )

    def prompts_left(self, issued: int, gen_batch_size: int) -> float:
        """How many prompts a step may still issue."""
        if self.max_num_gen_batches <= 0:
            return math.inf
        return self.max_num_gen_batches * gen_batch_size - issued

    def rollouts_left(self, asked: int, tokens: int, in_flight: int) -> float:
        """How many rollouts a step may still ask for; each one in flight is reserved its longest length."""
        left = math.inf if self.max_rollouts_per_step is None else self.max_rollouts_per_step - asked
        if self.max_tokens_per_step is None or self.max_tokens_per_rollout is None:
            return left
        return min(left, (self.max_tokens_per_step - tokens) // self.max_tokens_per_rollout - in_flight)


@dataclass(frozen=True)
class Surplus:
    """What happens to groups beyond the batch.

    Kept groups are carried while no older than ``max_carry_steps`` updates. ``on_full`` says what happens to groups
    that are still open when the batch is full. No choice starves a slow prompt.
    """

    max_carry_steps: int = 1
    on_full: OnFull = OnFull.FINISH

    def __post_init__(self) -> None:
        require(self.max_carry_steps >= 0, "surplus.max_carry_steps", self.max_carry_steps, "0 or more updates")
        object.__setattr__(self, "on_full", OnFull.parse("surplus.on_full", self.on_full))
        require(
            self.max_carry_steps > 0 or not self.pauses,
            "surplus.max_carry_steps",
            self.max_carry_steps,
            "1 or more with on_full=partial: what goes on after an update is older than it",
        )

    def oldest(self, step: int) -> int:
        """The version of the oldest group that a step may train."""
        return step - self.max_carry_steps

    def prompts_for(self, groups: int, keep_rate: KeepRate) -> float:
        """How many prompts to have open when so many groups are missing.

        What partial rollouts begin is never wasted: as many as may be. Without carrying, groups beyond the batch are.
        """
        if self.pauses:
            return math.inf
        return keep_rate.prompts_for(groups, deviations=SLACK if self.max_carry_steps else 0.0)

    @property
    def pauses(self) -> bool:
        """Whether rollouts that are open when the batch is full stop, and go on after the update."""
        return self.on_full is OnFull.PARTIAL
