"""What a step and a run may cost, how much to ask for, what happens to groups beyond the batch, and ``Exhausted``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from goldilocks.core.accounts import StepStatistics, in_words
from goldilocks.errors import require
from goldilocks.types import OnExhausted, OnFull

PRIOR_WEIGHT = 4.0  # groups that the user's expectation of the keep rate counts as
FORGETTING = 0.9  # of the keep rate, per step: the policy moves, and the rate with it
SLACK = 2.0  # standard deviations: a refill then nearly always suffices, and its surplus is carried


@dataclass(frozen=True)
class Limits:
    """What a batch of a step may cost. None, or a ``max_num_gen_batches`` of 0 or less, is no limit.

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

    def rollouts_left(self, asked: int, tokens: int, in_flight: int, batches: int) -> float:
        left = math.inf if self.max_rollouts_per_step is None else self.max_rollouts_per_step * batches - asked
        if self.max_tokens_per_step is None or self.max_tokens_per_rollout is None:
            return left
        return min(left, (self.max_tokens_per_step * batches - tokens) // self.max_tokens_per_rollout - in_flight)


@dataclass(frozen=True)
class Budget:
    """``goldilocks.budget``: what a run may cost.

    verl ends a run after a number of updates. A budget ends it at the first update that has reached one of its costs.
    """

    rollouts: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    validations: int | None = None  # spread evenly over the cost, in the place of trainer.test_freq

    def __post_init__(self) -> None:
        for cost, amount in self.costs.items():
            number = isinstance(amount, (int, float)) and math.isfinite(amount) and amount > 0
            require(number, f"goldilocks.budget.{cost}", amount, "a number above 0, or null")
        if self.validations is not None:
            key, count = "goldilocks.budget.validations", self.validations
            require(isinstance(count, int) and count >= 1, key, count, "1 or more, or null")
            require(bool(self.costs), key, count, "null without a budget of rollouts, tokens, seconds")

    @property
    def costs(self) -> dict[str, float]:
        """Return the costs that are bounded; a run without a budget has none."""
        amounts = {"rollouts": self.rollouts, "tokens": self.tokens, "seconds": self.seconds}
        return {cost: amount for cost, amount in amounts.items() if amount is not None}


class KeepRate:
    """An estimate, in (0, 1], of the share of groups that survive the filter. A refill is sized by it.

    Before any group is judged, the user's ``gen_batch_size`` is the estimate: 1,536 prompts for 512 groups is a keep
    rate of a third, and the first refill is then exactly one generation batch.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._kept = 0.0
        self._judged = 0.0

    @property
    def value(self) -> float:
        return (self._kept + PRIOR_WEIGHT * self._prior) / (self._judged + PRIOR_WEIGHT)

    def prompts_for(self, groups: int, *, deviations: float) -> int:
        """Return how many prompts to judge so that ``groups`` are kept, with this many standard deviations to spare.

        The number kept of m prompts has mean mp and variance mp(1 − p): solve mp − d·√(mp(1 − p)) = groups for m.
        """
        p = self.value
        spread = deviations / 2 * math.sqrt(p * (1 - p))
        return math.ceil(((spread + math.sqrt(spread**2 + p * groups)) / p) ** 2 - 1e-9)

    def observe(self, kept: bool) -> None:
        self._judged += 1
        self._kept += kept

    def take_back(self, groups: int) -> None:
        """Count groups that were rejected after all as not kept, so that the next refill asks for more."""
        self._kept = max(self._kept - groups, 0.0)

    def forget(self) -> None:
        """Discount the counts at the end of a step."""
        self._judged *= FORGETTING
        self._kept *= FORGETTING

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._kept, "judged": self._judged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept, self._judged = float(state["kept"]), float(state["judged"])


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
        reserved = f" ({limits.max_tokens_per_rollout} reserved for each rollout)" if limits.max_tokens_per_step else ""
        return cls(
            f"{kept} and no more can be had: {step.rollouts_asked} rollouts "
            f"of goldilocks.max_rollouts_per_step={limits.max_rollouts_per_step}, {step.tokens_arrived} tokens "
            f"of goldilocks.max_tokens_per_step={limits.max_tokens_per_step}{reserved}, {visits}"
        )
