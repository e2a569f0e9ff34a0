"""Statistics over a few seeds: the mean with its t-interval, and the cost to learn as much as a baseline.

The targets are 50, 75, 90 and 100 % of the baseline's gain: its accuracy at the equal cost less that before training,
both as means over the seeds. A cost is read off the mean curve, where it first reaches the target. The ratio is to the
baseline's own cost to reach the same target. Intervals are by bootstrap: seeds are drawn with replacement, the same for
both recipes, and everything is computed anew for each draw, the target too. A draw that does not reach its target has
an infinite cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from goldilocks.compare.results import Curve

CONFIDENCE = 0.95
SHARES_OF_GAIN = (0.5, 0.75, 0.9, 1.0)
DRAWS, SEED = 10_000, 1
ROUNDING = 1e-9  # means of the same accuracies in another order differ by this at most; a gain is a share of answers


@dataclass(frozen=True)
class Interval:
    """``mean ± half``; ``half`` is None for a single value."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
        """Return the confidence interval of the mean."""
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


@dataclass(frozen=True)
class Estimate:
    """A value and the ends of its interval; None is "not reached". With one seed there is no interval."""

    value: float | None
    interval: tuple[float | None, float | None] | None


@dataclass(frozen=True)
class Target:
    """A share of the baseline's gain.

    ``gained`` is the share of the draws in which the baseline gains anything. The others have no target and are left
    out. ``reached`` is the share of the rest that reaches the target.
    """

    share: float
    accuracy: float
    cost: Estimate
    ratio: Estimate
    reached: float
    gained: float


def targets(own: Sequence[Curve], baseline: Sequence[Curve], until: float) -> tuple[Target, ...]:
    """Return the targets of a baseline and what a recipe pays for them; none if the baseline has not gained.

    Both have a curve for each seed, in the same order.
    """
    knots = _knots([*own, *baseline], until)
    draws = _draws(len(own))
    mine, its = (draws @ _values(lines, knots) for lines in (own, baseline))
    gained = its[:, -1] - its[:, 0] > ROUNDING
    if not gained[0]:
        return ()
    often = _share(gained)
    return tuple(_target(share, knots, mine[gained], its[gained], often) for share in SHARES_OF_GAIN)


def _target(share: float, knots: np.ndarray, mine: np.ndarray, its: np.ndarray, gained: float) -> Target:
    """Return one target; the first row is the seeds as they are, the others are draws of them."""
    accuracy = (1 - share) * its[:, 0] + share * its[:, -1]
    cost = _first_reached(knots, mine, accuracy)
    ratio = cost / _first_reached(knots, its, accuracy)
    return Target(share, float(accuracy[0]), _estimate(cost), _estimate(ratio), _share(np.isfinite(cost)), gained)


def _share(which: np.ndarray) -> float:
    """Return the share of the draws, which come after the first row; of one seed there are none, and it counts."""
    return float(which[1:].mean() if len(which) > 1 else which[0])


def _knots(lines: Sequence[Curve], until: float) -> np.ndarray:
    """Return every cost at which a curve has a point, from where all curves have begun."""
    begin = max(min(line) for line in lines)
    return np.array(sorted({cost for line in lines for cost in line if begin <= cost <= until} | {begin, until}))


def _values(lines: Sequence[Curve], knots: np.ndarray) -> np.ndarray:
    return np.array([np.interp(knots, list(line), list(line.values())) for line in lines])


def _draws(seeds: int) -> np.ndarray:
    """Return weights of the seeds that sum to 1 in each row: first all alike, then as often as each was drawn."""
    alike = np.full((1, seeds), 1 / seeds)
    if seeds == 1:
        return alike
    drawn = np.random.default_rng(SEED).multinomial(seeds, alike[0], size=DRAWS) / seeds
    return np.concatenate([alike, drawn])


def _first_reached(knots: np.ndarray, curves: np.ndarray, accuracy: np.ndarray) -> np.ndarray:
    """Return for each curve the cost at which it first reaches its accuracy, or infinity."""
    there = curves >= accuracy[:, None]
    after = there.argmax(axis=1)
    before = np.maximum(after - 1, 0)
    rows = np.arange(len(curves))
    low, high = curves[rows, before], curves[rows, after]
    share = np.divide(accuracy - low, high - low, out=np.zeros_like(low), where=after > 0)
    cost = knots[before] + share * (knots[after] - knots[before])
    return np.where(there.any(axis=1), cost, math.inf)


def _estimate(values: np.ndarray) -> Estimate:
    value, drawn = _finite(values[0]), values[1:]
    if not len(drawn):
        return Estimate(value, None)
    tail = (1 - CONFIDENCE) / 2
    low = np.quantile(drawn, tail, method="lower")
    high = np.quantile(drawn, 1 - tail, method="higher")
    return Estimate(value, (_finite(low), _finite(high)))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
