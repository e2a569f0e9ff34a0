"""The progress of a run, what it had spent by the end of each step, and what an update costs.

Every generated rollout is charged, also dropped, cancelled and failed ones. The totals are those of the collector's
accounts. A run without a collector trains everything it generates, so its rollouts follow from its configuration and
its tokens from the mean length of the trained answers.

``Progress`` is read from the metrics file: one line while the run goes on, a summary at its end.

A recipe that drops groups fills a batch from several batches of rollouts. With sizes chosen for GRPO it then makes a
fraction of GRPO's updates, and at one learning rate accuracy follows the updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from goldilocks.dotted_keys import value_at
from goldilocks.runs.history import History, Series, at_or_before, increments, running_total, validation_accuracy

ROLLOUTS, TOKENS = "accounts/generated_rollouts", "accounts/generated_tokens"  # totals of a run, kept by the collector
LENGTH = "response_length/mean"  # of the rows that were trained

BATCH, MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
EPOCHS, N = "actor_rollout_ref.actor.ppo_epochs", "actor_rollout_ref.rollout.n"
BACKEND = "trainer.backend"

BATCHES = 3  # an average over fewer is mostly luck
TIMES = 4.0  # the hint is given if an update costs more than this many of GRPO's
SCORE = "critic/score/mean"
SECONDS = "timing_s/step"
VALIDATING = "timing_s/testing"
SPENT = "budget/spent"
STAGES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")

# By name, as plots label it.
COSTS = {"rollouts": "rollouts generated", "tokens": "tokens generated", "seconds": "seconds of training"}
COST_NAMES = tuple(COSTS)


@dataclass(frozen=True)
class Spending:
    """Running totals by step for each cost; an unknown cost is empty."""

    totals: Mapping[str, Series]

    def until(self, cost: str, step: int) -> float | None:
        """Return what had been spent when a step ended: 0 before the first step, None for an unknown cost."""
        series = self.totals[cost]
        return (at_or_before(series, step) or 0.0) if series else None

    def total(self, cost: str) -> float | None:
        return next(reversed(self.totals[cost].values()), None)


def spending(history: History, config: Mapping[str, Any]) -> Spending:
    """Return the spending by the metrics or, if they lack it, by the configuration."""
    prompts, n = value_at(config, BATCH), value_at(config, N)
    rollouts, tokens = history.series(ROLLOUTS), history.series(TOKENS)
    if not rollouts and isinstance(prompts, int) and isinstance(n, int):
        rollouts = running_total({step: float(prompts * n) for step in history.series(SCORE)})
    if not tokens:
        lengths, generated = history.series(LENGTH), increments(rollouts)
        tokens = running_total({step: lengths[step] * count for step, count in generated.items() if step in lengths})
    return Spending({"rollouts": rollouts, "tokens": tokens, "seconds": running_total(history.series(SECONDS))})


def updates_per_line(config: Mapping[str, Any]) -> int:
    """Return the updates of a line of the metrics: 1 on TRL, all updates of a batch on verl."""
    return 1 if value_at(config, BACKEND) == "trl" else _updates_per_batch(config)


def hint(config: Mapping[str, Any], generated: Sequence[int]) -> str | None:
    """Return which sizes would make as many updates as GRPO, if an update costs more than ``TIMES`` one of GRPO's.

    ``generated`` is the total of rollouts after each line of the metrics. The first line is left out: a resumed run
    has no total before it, and a new one generates the groups that later batches find carried.
    """
    batch, mini_batch, n = (value_at(config, key) for key in (BATCH, MINI_BATCH, N))
    lines_per_batch = max(1, _updates_per_batch(config) // updates_per_line(config))
    batches = (len(generated) - 1) // lines_per_batch
    if batches < BATCHES or not (batch and mini_batch and n):
        return None
    cost = (generated[batches * lines_per_batch] - generated[0]) / (batches * _updates_per_batch(config))
    plain = mini_batch * n / (value_at(config, EPOCHS) or 1)
    if cost <= TIMES * plain:
        return None
    said = f"an update costs {cost:,.0f} rollouts, {cost / plain:.1f} times GRPO's {plain:,.0f}"
    if mini_batch == 1:
        return f"{said}: choose prompts that differ more (goldilocks.selector), or other data"
    wanted = mini_batch * plain / cost  # groups in an update
    size = max(1, int(wanted))
    fits = max(one for one in range(1, size + 1) if batch % one == 0)
    many = "as many updates" if wanted >= 1 else f"{mini_batch} times the updates, still fewer than GRPO's,"
    return (
        f"{said}: {MINI_BATCH}={fits} would make {many} of them, "
        f"or {BATCH}={size * (batch // mini_batch)} with {MINI_BATCH}={size}, each from newer rollouts"
    )


def _updates_per_batch(config: Mapping[str, Any]) -> int:
    batch, mini_batch = value_at(config, BATCH), value_at(config, MINI_BATCH)
    mini_batches = max(1, round(batch / mini_batch)) if batch and mini_batch else 1
    return mini_batches * (value_at(config, EPOCHS) or 1)


@dataclass
class Progress:
    """The state of a run; ``add`` takes verl's records in order."""

    total_steps: float  # infinite where it is not known
    rollouts_per_step: int  # 0: they are not counted
    unit: str = "step"
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
    last: Mapping[str, float] = field(default_factory=dict)  # metrics of the last step

    def add(self, record: dict[str, Any]) -> None:
        """Take one line of metrics.jsonl: a validation, a training step, or both."""
        self.step, data = record["step"], record["data"]
        if (accuracy := validation_accuracy(data)) is not None:
            self.validations.append((self.step, accuracy))
        if SCORE not in data:
            return
        if self.first_step is None:
            self.first_step = self.step
        self.reward = data[SCORE]
        # The totals are the collector's; a trainer without one trains all that it generates.
        before, self.rollouts = self.rollouts, int(data.get(ROLLOUTS, self.rollouts + self.rollouts_per_step))
        self.generated.append(self.rollouts)
        self.last = data
        self.tokens = int(data.get(TOKENS, self.tokens + data.get(LENGTH, 0.0) * (self.rollouts - before)))
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
        """Return the seconds to the end by the mean of the last ten steps, or None where they are not known."""
        recent = self.seconds[-10:]
        if not recent:
            return None
        a_step = sum(recent) / len(recent) + self.validating / self.steps_done
        left = self.total_steps - self.step
        # Of the budget, as many steps as it lasts if they cost as much as the recent ones; the first share of a
        # resumed run includes earlier starts.
        known = (self.spent if self.first_step == 1 else self.spent[1:])[-len(recent) - 1 :]
        if len(known) > 1 and known[-1] > known[0]:
            left = min(left, max(1 - known[-1], 0.0) * (len(known) - 1) / (known[-1] - known[0]))
        return a_step * left if math.isfinite(left) else None

    def line(self) -> str:
        """``step 12/60 · reward 0.41 · validation 0.35 → 0.47 · 3,072 rollouts · 1:05 left``

        With a budget: ``step 12 · 41% of the budget · …``
        """
        uncounted = self.spent or math.isinf(self.total_steps)
        parts = [f"{self.unit} {self.step}" + ("" if uncounted else f"/{self.total_steps}")]
        if self.spent:
            parts.append(f"{self.spent[-1]:.0%} of the budget")
        if self.reward is not None:
            parts.append(f"reward {self.reward:.2f}")
        if self.validations:
            ends = [*self.validations[:1], *self.validations[1:][-1:]]
            parts.append(f"validation {' → '.join(f'{value:.1%}' for _, value in ends)}")
        if self.rollouts_per_step:
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
            mean = {stage: total / self.steps_done for stage, total in self.stages.items()}
            a_step = training / self.steps_done
            shown = {stage: value for stage, value in mean.items() if value >= 0.005}
            shown["rest"] = max(a_step - sum(mean.values()), 0.0)
            stages = ", ".join(f"{stage} {value:.2f}" for stage, value in shown.items())
            rows.append(("per step", f"{a_step:.2f} s: {stages}"))
        rows.append(("rollouts", closing(self.last) if ROLLOUTS in self.last else f"{self.rollouts:,} generated"))
        rows.append(("tokens", f"{self.tokens:,} generated"))
        return rows


def closing(metrics: Mapping[str, float]) -> str:
    """Return what became of a run's rollouts, in one line; where it is known, beside what uniform sampling needs."""
    generated, trained, dropped = (
        int(metrics.get(f"accounts/{name}_rollouts", 0)) for name in ("generated", "trained", "filtered")
    )
    line = f"{generated:,} generated, {trained:,} trained ({trained / max(generated, 1):.0%})"
    line += f", {dropped:,} in dropped groups" if dropped else ""
    found, needed = (metrics.get(f"selector/{name}", 0) for name in ("informative_groups", "uniform_rollouts"))
    if not needed:
        return line
    return f"{line}; uniform sampling would need about {needed:,.0f} for the same {found:,.0f} informative groups"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
