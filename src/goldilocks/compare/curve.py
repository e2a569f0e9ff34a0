"""Accuracy against cost: straight lines between validations.

A curve maps cost to accuracy, sorted by cost. Two validations at the same cost are one point, and the later one counts
(an update may train what an earlier one generated).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
