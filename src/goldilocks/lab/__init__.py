"""What measures: simulations, studies, reports and pass rates. Only the command line imports it.

What is measured over a few seeds is a mean with its t-interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """``mean ± half``; ``half`` is None for a single value."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
        mean = fmean(values)
        if len(values) < 2:
            return cls(mean, None)
        return cls(mean, t_quantile(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values)))


def t_quantile(confidence: float, freedom: int) -> float:
    """Return t such that P(|T| < t) is the confidence, by bisection."""
    low, high = 0.0, 1.0
    while t_mass(high, freedom) < confidence:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_mass(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def t_mass(t: float, freedom: int) -> float:
    """Return P(|T| < t), by the series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * cosine**2
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
