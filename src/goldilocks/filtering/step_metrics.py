"""Metrics of several batches as those of one: counts are summed, means are weighed by what they are over.

A module of its own, without torch: the driver combines metrics in the simulator too, which runs where torch is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


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
            before = combined.get(name)
            combined[name] = value if before is None else _both(before, value)
    return combined


def _both(one: float, other: float) -> float:
    if isinstance(one, Mean) and isinstance(other, Mean):
        return Mean(one * one.count + other * other.count, one.count + other.count)
    return one + other
