"""A run's metrics: by step, as verl's file logger wrote them; of several batches as of one; accuracy by columns.

A step may be logged in several lines, one for validation and one for training. A resumed run may repeat steps; the
values of the newest start count. Only finite numbers are kept. A metric that was not logged has an
empty series. The columns are those that ``goldilocks.validate_by`` names; their metrics are called ``val/level/3/acc``.

Of several batches, counts are summed, and means are weighed by what they are over. The driver does so in the simulator
too, which runs where torch is not.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from goldilocks.errors import require

Series = dict[int, float]
_VALIDATION = re.compile(r"val-core/(?P<source>.+)/[^/]+/mean@\d+")
VALIDATE_BY = "goldilocks.validate_by"
MOST_VALUES = 100  # of a column; more divide the data too finely
_BY_COLUMN = re.compile(r"val/(?P<column>[^/]+)/(?P<value>.*)/acc", re.DOTALL)


@dataclass(frozen=True)
class History:
    """Metrics by step, in the order of the steps."""

    steps: Mapping[int, Mapping[str, float]]

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> History:
        """Make a history from ``{"step": N, "data": {…}}`` objects. Where the step falls, the run was started again."""
        steps: dict[int, dict[str, float]] = {}
        for record in records:
            step, data = record.get("step"), record.get("data")
            if isinstance(step, int) and isinstance(data, dict):
                if steps and step < next(reversed(steps)):
                    steps = {earlier: values for earlier, values in steps.items() if earlier <= step}
                numbers = {name: value for name, value in data.items() if isinstance(value, (int, float))}
                finite = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
                steps.setdefault(step, {}).update(finite)
        return cls(steps)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        return sorted({name for data in self.steps.values() for name in data})

    def series(self, name: str) -> Series:
        """Return a metric's value at every step that has one."""
        return {step: data[name] for step, data in self.steps.items() if name in data}

    def first_of(self, *names: str) -> Series:
        """Return the series of the first of these metrics that was logged."""
        return next((series for series in map(self.series, names) if series), {})

    def last(self, name: str) -> float | None:
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
    before = [0.0, *totals.values()]
    return {step: total - earlier for (step, total), earlier in zip(totals.items(), before, strict=False)}


def running_total(series: Series) -> Series:
    return dict(zip(series, accumulate(series.values()), strict=True))


def at_or_before(series: Series, step: int) -> float | None:
    return next((value for when, value in reversed(series.items()) if when <= step), None)


def metric_name(column: str, value: Any) -> str:
    """Return the metric of the accuracy over the rows whose column has this value."""
    return f"val/{column}/{_as_word(value)}/acc"


def belief_name(column: str, value: Any) -> str:
    """Return the metric of the pass rate that is believed of the training prompts whose column has this value."""
    return f"belief/{column}/{_as_word(value)}"


def _as_word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def column_and_value(metric: str) -> tuple[str, str] | None:
    """Return the column and the value that a metric is the accuracy of, or None if it is another metric."""
    found = _BY_COLUMN.fullmatch(metric)
    return (found["column"], found["value"]) if found else None


def by_column(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the accuracies of a validation by column and value, numbers in their order; empty where none is logged."""
    found = [(column_and_value(name), accuracy) for name, accuracy in metrics.items()]
    columns: dict[str, dict[str, float]] = defaultdict(dict)
    for (column, value), accuracy in sorted((pair, accuracy) for pair, accuracy in found if pair):
        columns[column][value] = accuracy
    return {column: dict(sorted(own.items(), key=lambda item: place_of(item[0]))) for column, own in columns.items()}


def place_of(value: str) -> tuple[bool, float, str]:
    """Return the place of a value among those of its column: numbers come first, in their order."""
    try:
        return (False, float(value), value)
    except ValueError:
        return (True, 0.0, value)


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """Return the column of a row, or of its ``extra_info``."""
    info = row.get("extra_info") or {}
    there = row if column in row else info
    known = sorted({*row, *info})
    require(column in there, VALIDATE_BY, column, f"a column of the validation data: {', '.join(known)}")
    return there[column]


def accuracy_by(column: str, values: Sequence[Any], right: Sequence[float]) -> dict[str, float]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for value, one in zip(values, right, strict=True):
        by_name[metric_name(column, value)].append(one)
    check_values(column, len(by_name))
    return {name: math.fsum(ones) / len(ones) for name, ones in by_name.items()}


def check_values(column: str, count: int) -> None:
    require(count <= MOST_VALUES, VALIDATE_BY, column, f"a column of at most {MOST_VALUES} values, not {count}")


class Mean(float):
    """A mean that knows how many things it is over; over none it is 0."""

    count: float

    def __new__(cls, total: float, count: float) -> Mean:
        return cls.of(total / count if count else 0.0, count)

    @classmethod
    def of(cls, value: float, count: float) -> Mean:
        """Return a mean whose value is known."""
        mean = super().__new__(cls, value)
        mean.count = count
        return mean

    def __reduce__(self) -> tuple[Any, tuple[float, float]]:
        """The first process of several sends its metrics to the others."""
        return Mean.of, (float(self), self.count)


def combine(batches: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of all batches together; one that only some batches have is over those."""
    combined: dict[str, float] = {}
    for batch in batches:
        for name, value in batch.items():
            before = combined.get(name, 0.0)
            if isinstance(before, Mean) and isinstance(value, Mean):
                value = Mean(before * before.count + value * value.count, before.count + value.count)
            elif name in combined:
                value = before + value
            combined[name] = value
    return combined
