"""The figures of a study: a pure function of the results of its arms.

Accuracy is read off each arm's validation curve at the equal cost. ``Against`` holds a recipe against a baseline.
``difference`` is seed by seed: arms of one seed have the same data in the same order, so their chance errors cancel in
part. ``at_two_thirds`` is the accuracy at two thirds of the cost less the baseline's at the whole cost, seed by seed:
above zero beyond its interval, the recipe saves a third of the cost. ``along`` is the difference at each of ``SHARES``
of the cost: a recipe may learn sooner and end level. Yields are of what was trained over all that was generated. Means
have their t-interval.

The cost to learn as much as a baseline has four targets, 50, 75, 90 and 100 % of the baseline's gain: its accuracy at
the equal cost less that before training, both as means over the seeds. A cost is read off the mean curve, where it
first reaches the target. The ratio is to the baseline's own cost to reach the same target. Intervals are by bootstrap:
seeds are drawn with replacement, the same for both recipes, and everything is computed anew for each draw, the target
too. A draw that does not reach its target has an infinite cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean, stdev

import numpy as np

from goldilocks.lab.compare.arm import Edge, EqualCost, Values, edges
from goldilocks.lab.compare.study import Curve, Levels, Result, Results, Study

TWO_THIRDS = 2 / 3
TOTALS = ("updates", "rollouts", "tokens", "seconds", "wall_seconds")  # of an arm
SHARES = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
CONFIDENCE = 0.95
SHARES_OF_GAIN = (0.5, 0.75, 0.9, 1.0)
DRAWS, SEED = 10_000, 1
ROUNDING = 1e-9  # means of the same accuracies in another order differ by this at most; a gain is a share of answers


@dataclass(frozen=True)
class Against:
    """A recipe held against a baseline; against itself there are no differences."""

    baseline: str
    difference: Interval | None
    differences: tuple[float, ...]  # by seed
    along: tuple[Interval, ...]  # the same at each of SHARES of the cost
    at_two_thirds: Interval
    targets: tuple[Target, ...]


@dataclass(frozen=True)
class RecipeRow:
    """One recipe over its seeds. ``levels`` are accuracies by column and value, where the arms have them."""

    recipe: str
    settings: Values
    seeds: int
    accuracy: Interval
    levels: Mapping[str, Mapping[str, Interval]]
    against: tuple[Against, ...]
    updates: Interval
    rollouts_per_update: Interval
    informative_groups_per_update: Interval
    informative_groups_per_1k_rollouts: Interval
    signal_per_1k_rollouts: Interval
    informative_groups_per_1m_tokens: Interval
    signal_per_1m_tokens: Interval
    rollouts: Interval
    tokens: Interval
    seconds: Interval
    wall_seconds: Interval


@dataclass(frozen=True)
class Trial:
    """One combination of values that tuning tried; its accuracy is the mean over the tuning seeds."""

    recipe: str
    settings: Values
    accuracy: float
    chosen: bool


@dataclass(frozen=True)
class Spent:
    """The total cost of some arms."""

    arms: int
    rollouts: float
    tokens: float
    wall_seconds: float

    @classmethod
    def of(cls, results: Sequence[Result]) -> Spent:
        totals = (sum(getattr(one, name) for one in results) for name in ("rollouts", "tokens", "wall_seconds"))
        return cls(len(results), *totals)


@dataclass(frozen=True)
class Table:
    """The whole table. ``start`` is the mean accuracy before training, ``start_levels`` by column and value."""

    cost: EqualCost
    start: float
    start_levels: Mapping[str, Mapping[str, Interval]]
    baselines: tuple[str, ...]
    rows: tuple[RecipeRow, ...]
    trials: tuple[Trial, ...]
    edges: tuple[Edge, ...]
    tuning: Spent
    reported: Spent

    @property
    def columns(self) -> dict[str, list[str]]:
        """Return the values of each column whose accuracy every recipe has, before and after."""
        found = {
            column: [value for value in own if all(value in row.levels.get(column, {}) for row in self.rows)]
            for column, own in self.start_levels.items()
        }
        return {column: values for column, values in found.items() if values}

    def _repr_html_(self) -> str:
        from goldilocks.lab.compare.show import in_html  # which shows this class

        return in_html(self)


def make_table(study: Study, results: Results) -> Table:
    """Return the table of a study whose arms have all ended."""
    by_seed = sorted(results.reported, key=attrgetter("seed"))
    arms = {recipe: [one for one in by_seed if one.recipe == recipe] for recipe in study.recipes}
    baselines = [arms[recipe] for recipe in study.baselines]
    starts = [one.validations[0] for one in results.reported]
    chosen = study.choose(results.tuned)
    return Table(
        cost=study.cost,
        start=fmean(one.accuracy for one in starts),
        start_levels=_over_arms([one.levels for one in starts]),
        baselines=study.baselines,
        rows=tuple(_row(own, baselines, study.cost) for own in arms.values()),
        trials=tuple(
            Trial(recipe, settings, accuracy, settings == chosen[recipe])
            for recipe in study.recipes
            for settings, accuracy in study.trials(recipe, results.tuned)
        ),
        edges=tuple(edge for recipe in study.recipes for edge in edges(study.grid, recipe, chosen[recipe])),
        tuning=Spent.of(results.tuned),
        reported=Spent.of(results.reported),
    )


def _over_arms(levels: Sequence[Levels]) -> dict[str, dict[str, Interval]]:
    """Return the mean over arms for each column and value that all of them have."""
    return {
        column: {
            value: Interval.of([one[column][value] for one in levels])
            for value in own
            if all(value in one.get(column, {}) for one in levels)
        }
        for column, own in levels[0].items()
    }


def _row(own: Sequence[Result], baselines: Sequence[Sequence[Result]], cost: EqualCost) -> RecipeRow:
    def over_seeds(value: Callable[[Result], float]) -> Interval:
        return Interval.of([value(one) for one in own])

    return RecipeRow(
        recipe=own[0].recipe,
        settings=own[0].settings,
        seeds=len(own),
        accuracy=over_seeds(lambda one: one.accuracy_at(cost)),
        levels=_over_arms([one.levels_at(cost) for one in own]),
        against=tuple(_against(own, baseline, cost) for baseline in baselines),
        rollouts_per_update=over_seeds(lambda one: one.rollouts / max(one.updates, 1)),
        informative_groups_per_update=over_seeds(lambda one: one.informative_groups * one.epochs / max(one.updates, 1)),
        informative_groups_per_1k_rollouts=over_seeds(lambda one: 1e3 * one.informative_groups / one.rollouts),
        signal_per_1k_rollouts=over_seeds(lambda one: 1e3 * one.signal / one.rollouts),
        informative_groups_per_1m_tokens=over_seeds(lambda one: 1e6 * one.informative_groups / one.tokens),
        signal_per_1m_tokens=over_seeds(lambda one: 1e6 * one.signal / one.tokens),
        **{name: over_seeds(attrgetter(name)) for name in TOTALS},
    )


def _against(own: Sequence[Result], baseline: Sequence[Result], cost: EqualCost) -> Against:
    differences = () if own[0].recipe == baseline[0].recipe else _differences(own, baseline, cost)
    shares = SHARES if differences else ()
    curves, its = ([one.curve(cost.kind) for one in results] for results in (own, baseline))
    return Against(
        baseline=baseline[0].recipe,
        difference=Interval.of(differences) if differences else None,
        differences=differences,
        along=tuple(Interval.of(_differences(own, baseline, cost, share, share)) for share in shares),
        at_two_thirds=Interval.of(_differences(own, baseline, cost, TWO_THIRDS)),
        targets=targets(curves, its, cost.amount),
    )


def _differences(
    own: Sequence[Result], baseline: Sequence[Result], cost: EqualCost, share: float = 1.0, of_baseline: float = 1.0
) -> tuple[float, ...]:
    """Return accuracies at a share of the cost less the baseline's at a share of it, in the order of the seeds."""
    part, its = (EqualCost(cost.kind, part * cost.amount) for part in (share, of_baseline))
    return tuple(one.accuracy_at(part) - other.accuracy_at(its) for one, other in zip(own, baseline, strict=True))


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
    mine, its = (
        draws @ np.array([np.interp(knots, list(line), list(line.values())) for line in lines])
        for lines in (own, baseline)
    )
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
