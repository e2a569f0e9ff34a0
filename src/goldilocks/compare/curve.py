"""Accuracy against cost: straight lines between validations.

A curve maps cost to accuracy, sorted by cost. Two validations at the same cost are one point, and the later one counts
(an update may train what an earlier one generated).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

Curve = Mapping[float, float]


def curve(points: Iterable[tuple[float, float]]) -> Curve:
    """Make a curve from pairs of cost and accuracy in the order of time."""
    return dict(sorted(dict(points).items()))


def at(line: Curve, cost: float) -> float | None:
    """Return the accuracy at a cost, or None outside the curve."""
    before = max((known for known in line if known <= cost), default=None)
    after = min((known for known in line if known >= cost), default=None)
    if before is None or after is None:
        return None
    if before == after:
        return line[before]
    share = (cost - before) / (after - before)
    return (1 - share) * line[before] + share * line[after]


def mean_curve(lines: Sequence[Curve], until: float) -> Curve:
    """Return the mean of curves that all reach ``until``, at every cost at which any of them has a point."""
    knots = sorted({cost for line in lines for cost in line if cost <= until} | {until})
    means: dict[float, float] = {}
    for cost in knots:
        values = [value for value in (at(line, cost) for line in lines) if value is not None]
        if len(values) == len(lines):
            means[cost] = sum(values) / len(values)
    return means


def cost_to_reach(line: Curve, accuracy: float) -> float | None:
    """Return the cost at which the curve first reaches an accuracy, or None."""
    points = list(line.items())
    if points and points[0][1] >= accuracy:
        return points[0][0]
    for (cost, value), (next_cost, next_value) in itertools.pairwise(points):
        if value < accuracy <= next_value:
            return cost + (accuracy - value) / (next_value - value) * (next_cost - cost)
    return None
