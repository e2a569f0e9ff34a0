"""The progress of a run, read from its metrics file: one line while it runs, a summary at its end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from goldilocks.runs import costs
from goldilocks.runs.history import validation_accuracy

SCORE = "critic/score/mean"
SECONDS = "timing_s/step"
VALIDATING = "timing_s/testing"
SPENT = "budget/spent"

STAGES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")


@dataclass
class Progress:
    """The state of a run; ``add`` takes verl's records in order."""

    total_steps: int
    rollouts_per_step: int
    step: int = 0
    rollouts: int = 0
    tokens: int = 0
    reward: float | None = None
    first_step: int | None = None
    validations: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validating: float = 0.0  # seconds of validation after steps
    spent: list[float] = field(default_factory=list)  # shares of the budget, beginning with 0.0; empty without a budget
    stages: dict[str, float] = field(default_factory=dict)
    generated: list[int] = field(default_factory=list)  # rollouts in all, after each step

    def add(self, record: dict[str, Any]) -> None:
        """Take one line of metrics.jsonl: a validation, a training step, or both."""
        self.step, data = record["step"], record["data"]
        accuracy = validation_accuracy(data)
        if accuracy is not None:
            self.validations.append((self.step, accuracy))
        if SCORE not in data:
            return
        if self.first_step is None:
            self.first_step = self.step
        self.reward = data[SCORE]
        # The totals are the collector's; a trainer without one trains all that it generates.
        before, self.rollouts = self.rollouts, int(data.get(costs.ROLLOUTS, self.rollouts + self.rollouts_per_step))
        self.generated.append(self.rollouts)
        self.tokens = int(data.get(costs.TOKENS, self.tokens + data.get(costs.LENGTH, 0.0) * (self.rollouts - before)))
        self.seconds.append(data.get(SECONDS, 0.0))
        self.validating += data.get(VALIDATING, 0.0)
        if SPENT in data:
            self.spent.append(data[SPENT])
        for stage in STAGES:
            self.stages[stage] = self.stages.get(stage, 0.0) + data.get(f"timing_s/{stage}", 0.0)

    @property
    def steps_done(self) -> int:
        """Return the training steps since the start or the last resume."""
        return len(self.seconds)

    @property
    def done(self) -> float:
        """Return the share that is done, of the budget or of the steps, whichever is further."""
        return min(1.0, max(self.step / max(self.total_steps, 1), self.spent[-1] if self.spent else 0.0))

    @property
    def eta(self) -> float | None:
        """Return the seconds to the end by the mean of the last ten steps, or None before the first step."""
        recent = self.seconds[-10:]
        if not recent:
            return None
        a_step = sum(recent) / len(recent) + self.validating / self.steps_done
        return a_step * min(self.total_steps - self.step, self._budget_left(len(recent)))

    def line(self) -> str:
        """``step 12/60 · reward 0.41 · validation 0.35 → 0.47 · 3,072 rollouts · 1:05 left``

        With a budget: ``step 12 · 41% of the budget · …``
        """
        parts = [f"step {self.step}" if self.spent else f"step {self.step}/{self.total_steps}"]
        if self.spent:
            parts.append(f"{self.spent[-1]:.0%} of the budget")
        if self.reward is not None:
            parts.append(f"reward {self.reward:.2f}")
        if self.validations:
            ends = [*self.validations[:1], *self.validations[1:][-1:]]
            parts.append(f"validation {' → '.join(f'{value:.1%}' for _, value in ends)}")
        parts.append(f"{self.rollouts:,} rollouts")
        if self.eta is not None:
            parts.append(f"{clock(self.eta)} left")
        return " · ".join(parts)

    def summary(self, elapsed: float) -> list[tuple[str, str]]:
        rows = []
        if len(self.validations) > 1:
            before, after = self.validations[0][1], self.validations[-1][1]
            rows.append(("validation", f"{before:.1%} → {after:.1%} ({100 * (after - before):+.1f} points)"))
        elif self.validations:
            rows.append(("validation", f"{self.validations[0][1]:.1%}"))
        training = sum(self.seconds)
        rows.append(("steps", f"{self.steps_done}"))
        rows.append(("time", f"{clock(elapsed)} ({clock(elapsed - training)} start, validation and end)"))
        if self.steps_done:
            rows.append(("per step", f"{training / self.steps_done:.2f} s: {self._stages()}"))
        rows.append(("rollouts", f"{self.rollouts:,} generated"))
        rows.append(("tokens", f"{self.tokens:,} generated"))
        return rows

    def _budget_left(self, recent: int) -> float:
        """Return for how many more steps the budget lasts, if they cost as much as the recent ones."""
        # The first share of a resumed run includes earlier starts.
        known = self.spent if self.first_step == 1 else self.spent[1:]
        steps = min(recent, len(known) - 1)
        gained = known[-1] - known[-1 - steps] if steps > 0 else 0.0
        return max(1 - known[-1], 0.0) * steps / gained if gained else math.inf

    def _stages(self) -> str:
        mean = {stage: total / self.steps_done for stage, total in self.stages.items()}
        known = sum(mean.values())
        rest = sum(self.seconds) / self.steps_done - known
        shown = {stage: value for stage, value in mean.items() if value >= 0.005} | {"rest": max(rest, 0.0)}
        return ", ".join(f"{stage} {value:.2f}" for stage, value in shown.items())


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
