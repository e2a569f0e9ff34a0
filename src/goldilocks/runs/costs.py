"""What a run had spent by the end of each step: rollouts, tokens and minutes. Every generated rollout is charged.

The totals are those of the collector's accounts. A run without a collector trains everything it generates, so its
rollouts follow from its configuration and its tokens from the mean length of the trained answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from goldilocks.dotted_keys import value_at
from goldilocks.runs.history import History, Series, at_or_before, running_total

ROLLOUTS, TOKENS = "accounts/generated_rollouts", "accounts/generated_tokens"  # totals of a run, kept by the collector
LENGTH = "response_length/mean"  # of the rows that were trained


@dataclass(frozen=True)
class Cost:
    """A kind of cost. ``name`` is its field in the plots, ``title`` the axis label, ``form`` the number format."""

    name: str
    title: str
    form: str = "~s"


COSTS = (
    Cost("rollouts", "rollouts generated"),
    Cost("tokens", "tokens generated"),
    Cost("minutes", "wall-clock, minutes", form="~r"),
)


COST_NAMES = tuple(cost.name for cost in COSTS)


@dataclass(frozen=True)
class Spending:
    """Running totals by step for each cost; an unknown cost is empty."""

    totals: Mapping[str, Series]

    def until(self, cost: str, step: int) -> float | None:
        """Return what had been spent when a step ended: 0 before the first step, None for an unknown cost."""
        series = self.totals[cost]
        if not series:
            return None
        return at_or_before(series, step) or 0.0

    def total(self, cost: str) -> float | None:
        return next(reversed(self.totals[cost].values()), None)


def spending(history: History, config: Mapping[str, Any]) -> Spending:
    """Return the spending by the metrics or, if they lack it, by the configuration."""
    seconds = running_total(history.series("timing_s/step"))
    rollouts = history.series(ROLLOUTS) or _planned_rollouts(history, config)
    tokens = history.series(TOKENS) or _trained_tokens(history, rollouts)
    return Spending(
        {
            "rollouts": rollouts,
            "tokens": tokens,
            "minutes": {step: total / 60 for step, total in seconds.items()},
        }
    )


def _planned_rollouts(history: History, config: Mapping[str, Any]) -> Series:
    prompts, n = value_at(config, "data.train_batch_size"), value_at(config, "actor_rollout_ref.rollout.n")
    if not isinstance(prompts, int) or not isinstance(n, int):
        return {}
    return running_total({step: float(prompts * n) for step in history.series("critic/score/mean")})


def _trained_tokens(history: History, rollouts: Series) -> Series:
    lengths, before, spent = history.series(LENGTH), 0.0, {}
    for step, total in rollouts.items():
        if step in lengths:
            spent[step] = lengths[step] * (total - before)
        before = total
    return running_total(spent)
