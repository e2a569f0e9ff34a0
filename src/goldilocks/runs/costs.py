"""What a run had spent by the end of each step: rollouts, tokens and seconds, every screening rollout charged.

The collector's accounts say it. A run without a collector trains all that it generates, so its rollouts follow from its
configuration, and its tokens from the mean length of what it trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from goldilocks.nested import value_at
from goldilocks.runs.history import History, Series, at_or_before, running_total

ROLLOUTS, TOKENS = "accounts/generated_rollouts", "accounts/generated_tokens"  # totals of a run, kept by the collector
LENGTH = "response_length/mean"  # of the rows that were trained


@dataclass(frozen=True)
class Cost:
    """A way to measure what was spent. ``name`` is the field of the plots drawn against it, ``form`` their format."""

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
    """Running totals by step for each cost; a cost nobody knows is empty."""

    totals: Mapping[str, Series]

    def until(self, cost: str, step: int) -> float | None:
        """What had been spent when a step ended. Before the first step, as at step 0, that is nothing."""
        series = self.totals[cost]
        if not series:
            return None
        return at_or_before(series, step) or 0.0

    def total(self, cost: str) -> float | None:
        return next(reversed(self.totals[cost].values()), None)


def spending(history: History, config: Mapping[str, Any]) -> Spending:
    """From the metrics, and where they do not say it from the configuration."""
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
