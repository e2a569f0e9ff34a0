"""Validation accuracy by the columns of the data that ``goldilocks.validate_by`` names: ``val/level/3/acc``."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from goldilocks.errors import require

KEY = "goldilocks.validate_by"
MOST_VALUES = 100  # of a column; more divide the data too finely
_NAME = re.compile(r"val/(?P<column>[^/]+)/(?P<value>.*)/acc", re.DOTALL)


def metric_name(column: str, value: Any) -> str:
    """Return the metric of the accuracy over the rows whose column has this value."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"val/{column}/{text}/acc"


def column_and_value(metric: str) -> tuple[str, str] | None:
    """Return the column and the value that a metric is the accuracy of, or None if it is another metric."""
    found = _NAME.fullmatch(metric)
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
    require(column in there, KEY, column, f"a column of the validation data: {', '.join(known)}")
    return there[column]


def accuracy_by(column: str, values: Sequence[Any], right: Sequence[float]) -> dict[str, float]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for value, one in zip(values, right, strict=True):
        by_name[metric_name(column, value)].append(one)
    check_values(column, len(by_name))
    return {name: math.fsum(ones) / len(ones) for name, ones in by_name.items()}


def check_values(column: str, count: int) -> None:
    require(count <= MOST_VALUES, KEY, column, f"a column of at most {MOST_VALUES} values, not {count}")
