"""The figures of a study: a pure function of the results of its arms.

A study has three clocks: rollouts, generated tokens, and seconds of training. One is the study's own, and ends its
arms; on the others arms are compared at the most that all of them have spent. Seconds are of seeds whose arms ran
alone. On each clock a recipe has its accuracy and, against each baseline, ``Against``: the difference seed by seed
(arms of one seed have the same data in the same order, so their chance errors cancel in part), and what it pays for the
baseline's accuracy at ``SHARES_OF_COST`` of the clock. Means have their t-interval.

A cost to an accuracy is read off the gap, the recipe's accuracy at each cost less the baseline's at the share, seed by
seed. The cost is where the gap's mean over the seeds first reaches 0, and the ends of its interval are where the upper
and the lower end of the mean's t-interval do: costs in between are those at which the seeds do not tell the two apart.
The baseline's own cost is the share of the clock, so that the ratio has the same interval. A test has its coverage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from statistics import fmean

import numpy as np

from goldilocks.config.recipes import name_of
from goldilocks.lab import CONFIDENCE, Interval, t_quantile
from goldilocks.lab.compare.arm import Edge, EqualCost, Values, edges
from goldilocks.lab.compare.study import Levels, Result, Results, Study
from goldilocks.runs.costs import COST_NAMES

TOTALS = ("updates", "rollouts", "tokens", "seconds", "wall_seconds")  # of an arm
POWER = 0.8  # the share of studies that would see the smallest difference of which that is said
SHARES_OF_COST = (0.5, 0.75, 1.0)
PARTS = 1_000  # of a clock; the costs at which the gap to a baseline is looked at
ROUNDING = 1e-9  # of accuracies that are the same


@dataclass(frozen=True)
class Clock:
    """What arms are compared at, and the seeds whose arms count."""

    cost: EqualCost
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Price:
    """What a recipe pays for the accuracy that a baseline has at a share of the clock; None is "not reached".

    ``ratio`` is to what the baseline pays, ``interval`` that of the ratio; with one seed there is none.
    """

    share: float
    accuracy: float
    cost: float | None
    ratio: float | None
    interval: tuple[float | None, float | None] | None


@dataclass(frozen=True)
class Against:
    """A recipe held against a baseline on one clock. ``seen`` is the smallest difference the seeds could have shown."""

    baseline: str
    clock: str
    difference: Interval
    differences: tuple[float, ...]  # by seed
    seen: float | None
    prices: tuple[Price, ...]


@dataclass(frozen=True)
class RecipeRow:
    """One recipe over its seeds. ``levels`` are accuracies by column and value, where the arms have them.

    ``accuracy`` is by clock. ``gain`` is over the accuracy before training, at the equal cost.
    """

    recipe: str
    settings: Values
    seeds: int
    accuracy: Mapping[str, Interval]
    gain: Interval
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
    """The whole table. ``start`` is the mean accuracy before training, ``start_levels`` by column and value.

    ``clocks`` begin with the study's own. ``answers`` are those of a validation, 0 if that is not known. ``mixed`` is
    what arms differ in beside the study's settings: by commit, package or device, the arms of each value.
    """

    cost: EqualCost
    clocks: tuple[Clock, ...]
    start: float
    start_levels: Mapping[str, Mapping[str, Interval]]
    baselines: tuple[str, ...]
    rows: tuple[RecipeRow, ...]
    trials: tuple[Trial, ...]
    edges: tuple[Edge, ...]
    tuning: Spent
    reported: Spent
    answers: int
    mixed: Mapping[str, Mapping[str, Sequence[str]]]

    @property
    def columns(self) -> dict[str, list[str]]:
        """Return the values of each column whose accuracy every recipe has, before and after."""
        found = {
            column: [value for value in own if all(value in row.levels.get(column, {}) for row in self.rows)]
            for column, own in self.start_levels.items()
        }
        return {column: values for column, values in found.items() if values}


def make_table(study: Study, results: Results) -> Table:
    by_seed = sorted(results.reported, key=attrgetter("seed"))
    arms = {recipe: [one for one in by_seed if one.recipe == recipe] for recipe in study.recipes}
    baselines = [arms[recipe] for recipe in study.baselines]
    clocks = tuple(_clocks(study.cost, by_seed))
    starts = [one.validations[0] for one in results.reported]
    chosen = study.choose(results.tuned)
    return Table(
        cost=study.cost,
        clocks=clocks,
        start=fmean(one.accuracy for one in starts),
        start_levels=_over_arms([one.levels for one in starts]),
        baselines=study.baselines,
        rows=tuple(_row(own, baselines, clocks) for own in arms.values()),
        trials=tuple(
            Trial(recipe, settings, accuracy, settings == chosen[recipe])
            for recipe in study.recipes
            for settings, accuracy in study.trials(recipe, results.tuned)
        ),
        edges=tuple(edge for recipe in study.recipes for edge in edges(study.grid, recipe, chosen[recipe])),
        tuning=Spent.of(results.tuned),
        reported=Spent.of(results.reported),
        answers=min(one.answers for one in by_seed),
        mixed=_mixed([*results.tuned, *by_seed]),
    )


def _clocks(cost: EqualCost, arms: Sequence[Result]) -> Iterator[Clock]:
    """Yield the study's clock, then the others with the most that all arms have spent there."""
    crowded = {one.seed for one in arms if not one.alone}
    for kind in sorted(COST_NAMES, key=lambda name: name != cost.kind):
        seeds = {one.seed for one in arms} - (crowded if kind == "seconds" else set())
        ends = [getattr(one.validations[-1], kind) for one in arms if one.seed in seeds]
        if ends and min(ends) > 0:
            yield Clock(cost if kind == cost.kind else EqualCost(kind, min(ends)), tuple(sorted(seeds)))


def _mixed(arms: Sequence[Result]) -> dict[str, dict[str, list[str]]]:
    """Return what the arms' origins differ in. Each recipe has a digest of its own, which other recipes lack."""
    found: dict[str, dict[str, list[str]]] = {}
    for one in arms:
        every = dict.fromkeys((key for arm in arms for key in arm.origin if not key.startswith("recipe ")), "none")
        for key, value in {**every, **one.origin}.items():
            found.setdefault(key, {}).setdefault(value, []).append(f"{name_of(one.recipe)}-seed{one.seed}")
    return {key: values for key, values in found.items() if len(values) > 1}


def _over_arms(levels: Sequence[Levels]) -> dict[str, dict[str, Interval]]:
    return {
        column: {
            value: Interval.of([one[column][value] for one in levels])
            for value in own
            if all(value in one.get(column, {}) for one in levels)
        }
        for column, own in levels[0].items()
    }


def _row(own: Sequence[Result], baselines: Sequence[Sequence[Result]], clocks: Sequence[Clock]) -> RecipeRow:
    def over_seeds(value: Callable[[Result], float], seeds: Sequence[int] = clocks[0].seeds) -> Interval:
        return Interval.of([value(one) for one in own if one.seed in seeds])

    cost = clocks[0].cost
    others = [baseline for baseline in baselines if baseline[0].recipe != own[0].recipe]
    return RecipeRow(
        recipe=own[0].recipe,
        settings=own[0].settings,
        seeds=len(own),
        accuracy={one.cost.kind: over_seeds(methodcaller("accuracy_at", one.cost), one.seeds) for one in clocks},
        gain=over_seeds(lambda one: one.accuracy_at(cost) - one.validations[0].accuracy),
        levels=_over_arms([one.levels_at(cost) for one in own]),
        against=tuple(_against(own, baseline, clock) for baseline in others for clock in clocks),
        rollouts_per_update=over_seeds(lambda one: one.rollouts / max(one.updates, 1)),
        informative_groups_per_update=over_seeds(lambda one: one.informative_groups * one.epochs / max(one.updates, 1)),
        informative_groups_per_1k_rollouts=over_seeds(lambda one: 1e3 * one.informative_groups / one.rollouts),
        signal_per_1k_rollouts=over_seeds(lambda one: 1e3 * one.signal / one.rollouts),
        informative_groups_per_1m_tokens=over_seeds(lambda one: 1e6 * one.informative_groups / one.tokens),
        signal_per_1m_tokens=over_seeds(lambda one: 1e6 * one.signal / one.tokens),
        **{name: over_seeds(attrgetter(name)) for name in TOTALS},
    )


def _against(own: Sequence[Result], baseline: Sequence[Result], clock: Clock) -> Against:
    """Return what the gap between the arms of each seed says, at the end of the clock and along it."""
    kind, amount = clock.cost.kind, clock.cost.amount
    costs = np.linspace(0, amount, PARTS + 1)
    mine, its = (
        np.array([one.accuracies(kind, costs) for one in arms if one.seed in clock.seeds]) for arms in (own, baseline)
    )
    differences = tuple((mine[:, -1] - its[:, -1]).tolist())
    difference = Interval.of(differences)
    freedom = len(differences) - 1
    ratio = 1 + t_quantile(2 * POWER - 1, freedom) / t_quantile(CONFIDENCE, freedom) if freedom else 0.0
    return Against(
        baseline=baseline[0].recipe,
        clock=kind,
        difference=difference,
        differences=differences,
        seen=None if difference.half is None else ratio * difference.half,
        prices=tuple(price(costs, mine, its, share) for share in SHARES_OF_COST),
    )


def price(costs: np.ndarray, mine: np.ndarray, its: np.ndarray, share: float) -> Price:
    """Return what is paid for the baseline's accuracy at a share of the last cost; both have a row for each seed."""
    target = its[:, [round(share * (len(costs) - 1))]]
    gap = mine - target
    seeds, mean = len(gap), gap.mean(axis=0)

    def first(line: np.ndarray) -> float | None:
        there = line >= -ROUNDING
        return float(costs[there.argmax()]) if there.any() else None

    def of_baseline(cost: float | None) -> float | None:
        return None if cost is None else cost / (share * float(costs[-1]))

    cost, interval = first(mean), None
    if seeds > 1:
        half = t_quantile(CONFIDENCE, seeds - 1) * gap.std(axis=0, ddof=1) / math.sqrt(seeds)
        interval = (of_baseline(first(mean + half)), of_baseline(first(mean - half)))
    return Price(share, float(target.mean()), cost, of_baseline(cost), interval)
