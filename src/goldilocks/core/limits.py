"""What a step may cost, what happens to groups beyond the batch, and the error of a step that cannot be filled."""

from __future__ import annotations

import math
from dataclasses import dataclass

from goldilocks.core.statistics import KeepRate, StepStatistics, in_words
from goldilocks.errors import require
from goldilocks.types import OnExhausted, OnFull

SLACK = 2.0  # standard deviations: a refill then nearly always suffices, and its surplus is carried


@dataclass(frozen=True)
class Limits:
    """What one step may cost. None, or a ``max_num_gen_batches`` of 0 or less, is no limit.

    No limit is ever exceeded. Tokens are not known before they are written, so ``max_tokens_per_step`` reserves
    ``max_tokens_per_rollout`` for each rollout in flight.
    """

    max_num_gen_batches: int = 0
    max_rollouts_per_step: int | None = None
    max_tokens_per_step: int | None = None
    max_tokens_per_rollout: int | None = None
    max_retries: int = 2
    on_exhausted: OnExhausted = OnExhausted.ERROR

    def __post_init__(self) -> None:
        for key in ("goldilocks.max_rollouts_per_step", "goldilocks.max_tokens_per_step", "max_tokens_per_rollout"):
            value = getattr(self, key.removeprefix("goldilocks."))
            require(value is None or value > 0, key, value, "a number above 0, or null for no limit")
        require(self.max_retries >= 0, "goldilocks.max_retries", self.max_retries, "0 or more")
        on_exhausted = OnExhausted.parse("algorithm.filter_groups.on_exhausted", self.on_exhausted)
        object.__setattr__(self, "on_exhausted", on_exhausted)
        longest, known = self.max_tokens_per_rollout, self.max_tokens_per_rollout is not None
        accepted = "with max_tokens_per_step, the length of the longest rollout"
        require(self.max_tokens_per_step is None or known, "max_tokens_per_rollout", longest, accepted)

    def prompts_left(self, issued: int, gen_batch_size: int) -> float:
        if self.max_num_gen_batches <= 0:
            return math.inf
        return self.max_num_gen_batches * gen_batch_size - issued

    def rollouts_left(self, asked: int, tokens: int, in_flight: int) -> float:
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
        key, steps = "algorithm.filter_groups.max_carry_steps", self.max_carry_steps
        require(steps >= 0, key, steps, "0 or more updates")
        object.__setattr__(self, "on_full", OnFull.parse("algorithm.filter_groups.on_full", self.on_full))
        accepted = "1 or more with on_full=partial: a rollout that goes on after an update is older than the update"
        require(steps > 0 or not self.pauses, key, steps, accepted)

    def oldest(self, step: int) -> int:
        """The version of the oldest group that a step may train."""
        return step - self.max_carry_steps

    def prompts_for(self, groups: int, keep_rate: KeepRate) -> float:
        """How many prompts to have open when ``groups`` groups are missing.

        Partial rollouts are never wasted, so there is no bound. Without carrying, groups beyond the batch are wasted,
        so there is no slack.
        """
        if self.pauses:
            return math.inf
        return keep_rate.prompts_for(groups, deviations=SLACK if self.max_carry_steps else 0.0)

    @property
    def pauses(self) -> bool:
        """Whether rollouts that are open when the batch is full stop, and go on after the update."""
        return self.on_full is OnFull.PARTIAL


class Exhausted(ValueError):
    """The limits, or the data, leave too few groups for a batch. Nothing is lost: the state can be saved as it is."""

    @classmethod
    def after(cls, limits: Limits, step: StepStatistics, gen_batch_size: int, kept: str, visits: str) -> Exhausted:
        batches, most = step.num_gen_batches(gen_batch_size), limits.max_num_gen_batches
        if step.failures and not step.judged.rollouts:
            reasons = ", ".join(f"{count} × {in_words(reason)}" for reason, count in step.failures.items())
            return cls(f"{kept}: every rollout of the step failed ({reasons})")
        if 0 < most <= batches:
            return cls(
                f"num_gen_batches={batches} >= max_num_gen_batches={most}. "
                "Generated too many batches. Please check if your data are too difficult."
            )
        return cls(
            f"{kept} and no more can be had: {step.rollouts_asked} rollouts "
            f"of goldilocks.max_rollouts_per_step={limits.max_rollouts_per_step}, "
            f"{step.tokens_arrived} tokens of goldilocks.max_tokens_per_step={limits.max_tokens_per_step}, {visits}"
        )
