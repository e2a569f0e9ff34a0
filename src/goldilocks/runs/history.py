"""What an update of the policy costs in rollouts, against what one costs GRPO with the same sizes.

A recipe that drops groups fills a batch from several batches of rollouts. With sizes chosen for GRPO it then makes a
fraction of GRPO's updates, and at one learning rate accuracy follows the updates.

A run's metrics by step, as verl's file logger wrote them.

A step may be logged in several lines, one for validation and one for training. A resumed run logs to a new file and may
repeat steps; the values of the newest start count. Only finite numbers are kept. A metric that was not logged has an
empty series.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from goldilocks.dotted_keys import value_at

BATCH, MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
EPOCHS, N = "actor_rollout_ref.actor.ppo_epochs", "actor_rollout_ref.rollout.n"
BACKEND = "trainer.backend"

BATCHES = 3  # an average over fewer is mostly luck
TIMES = 4.0  # an update that costs more than so many of GRPO's is worth a word


def updates_per_line(config: Mapping[str, Any]) -> int:
    """TRL logs every update. verl logs every batch, and makes an update of each mini-batch in each epoch over it."""
    return 1 if value_at(config, BACKEND) == "trl" else _updates_per_batch(config)


def hint(config: Mapping[str, Any], generated: Sequence[int]) -> str | None:
    """Say once it is known that an update costs more than ``TIMES`` GRPO's, and which sizes would make as many updates.

    ``generated`` is the total of rollouts after each line of the metrics. The first line is left out: a resumed run
    has no total before it, and a new one fills what later batches find carried.
    """
    cost = _rollouts_per_update(config, generated)
    batch, mini_batch, n = (value_at(config, key) for key in (BATCH, MINI_BATCH, N))
    if cost is None or not (batch and mini_batch and n):
        return None
    plain = mini_batch * n / (value_at(config, EPOCHS) or 1)
    if cost <= TIMES * plain:
        return None
    said = f"an update costs {cost:,.0f} rollouts, {cost / plain:.1f} times GRPO's {plain:,.0f}"
    return f"{said}: {_advice(batch, mini_batch, mini_batch * plain / cost)}"


def _advice(batch: int, mini_batch: int, wanted: float) -> str:
    """The sizes that make as many updates of the same rollouts as GRPO makes; ``wanted`` groups in each."""
    if mini_batch == 1:
        return "choose prompts that differ more (goldilocks.selector), or other data"
    size = max(1, int(wanted))
    fits = max(one for one in range(1, size + 1) if batch % one == 0)
    smaller = size * (batch // mini_batch)
    many = "as many updates" if wanted >= 1 else f"{mini_batch} times the updates, still fewer than GRPO's,"
    return (
        f"{MINI_BATCH}={fits} would make {many} of them, "
        f"or {BATCH}={smaller} with {MINI_BATCH}={size}, each from newer rollouts"
    )


def _rollouts_per_update(config: Mapping[str, Any], generated: Sequence[int]) -> float | None:
    """The mean over whole batches after the first line, or None before there are ``BATCHES`` of them."""
    lines_per_batch = max(1, _updates_per_batch(config) // updates_per_line(config))
    batches = (len(generated) - 1) // lines_per_batch
    if batches < BATCHES:
        return None
    return (generated[batches * lines_per_batch] - generated[0]) / (batches * _updates_per_batch(config))


def _updates_per_batch(config: Mapping[str, Any]) -> int:
    batch, mini_batch = value_at(config, BATCH), value_at(config, MINI_BATCH)
    mini_batches = max(1, round(batch / mini_batch)) if batch and mini_batch else 1
    return mini_batches * (value_at(config, EPOCHS) or 1)


Series = dict[int, float]
_VALIDATION = re.compile(r"val-core/(?P<source>.+)/[^/]+/mean@\d+")


@dataclass(frozen=True)
class History:
    """Metrics by step, in the order of the steps."""

    steps: Mapping[int, Mapping[str, float]]

    @classmethod
    def of(cls, *starts: Iterable[Mapping[str, Any]]) -> History:
        """Make a history from ``{"step": N, "data": {…}}`` objects, one sequence for each start of the run."""
        steps: dict[int, dict[str, float]] = {}
        for records in starts:
            started = False
            for record in records:
                step, data = record.get("step"), record.get("data")
                if isinstance(step, int) and isinstance(data, dict):
                    if not started:
                        steps = {earlier: values for earlier, values in steps.items() if earlier <= step}
                        started = True
                    numbers = {name: float(value) for name, value in data.items() if _number(value)}
                    steps.setdefault(step, {}).update(numbers)
        return cls(dict(sorted(steps.items())))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @property
    def names(self) -> list[str]:
        """Return the name of every metric that was logged."""
        return sorted({name for data in self.steps.values() for name in data})

    def series(self, name: str) -> Series:
        """Return a metric's value at every step that has one."""
        return {step: data[name] for step, data in self.steps.items() if name in data}

    def first_of(self, *names: str) -> Series:
        """Return the series of the first of these metrics that was logged."""
        return next((series for series in map(self.series, names) if series), {})

    def last(self, name: str) -> float | None:
        """Return the metric's latest value."""
        return next(reversed(self.series(name).values()), None)


def validated_source(metric: str) -> str | None:
    """Return the data source that a metric is the validation accuracy of, or None if it is another metric."""
    found = _VALIDATION.fullmatch(metric)
    return found["source"] if found else None


def validation_accuracy(data: Mapping[str, Any]) -> float | None:
    """Return the mean validation accuracy over the data sources, or None if nothing was validated."""
    values = [value for name, value in data.items() if validated_source(name) is not None]
    return sum(values) / len(values) if values else None


def increments(totals: Series) -> Series:
    """Return what each step added to a running total."""
    before = [0.0, *totals.values()]
    return {step: total - earlier for (step, total), earlier in zip(totals.items(), before, strict=False)}


def running_total(series: Series) -> Series:
    """Return the sum up to and including each step."""
    total, totals = 0.0, {}
    for step, value in series.items():
        total += value
        totals[step] = total
    return totals


def at_or_before(series: Series, step: int) -> float | None:
    """Return the latest value at or before a step."""
    return next((value for when, value in reversed(series.items()) if when <= step), None)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
