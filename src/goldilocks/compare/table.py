"""The figures of a study: a pure function of the results of its arms.

Accuracy is read off each arm's validation curve at the equal cost. ``Against`` holds a recipe against a baseline.
``difference`` is seed by seed: arms of one seed have the same data in the same order, so their chance errors cancel in
part. ``at_two_thirds`` is the accuracy at two thirds of the cost less the baseline's at the whole cost, seed by seed:
above zero beyond its interval, the recipe saves a third of the cost. ``along`` is the difference at each of ``SHARES``
of the cost: a recipe may learn sooner and end level. Yields are of what was trained over all that was generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from statistics import fmean
from typing import Any

from goldilocks.compare.arm import Edge, EqualCost, Values, edges
from goldilocks.compare.results import Levels, Result, Results
from goldilocks.compare.study import Study
from goldilocks.compare.targets import Interval, Target, targets

TWO_THIRDS = 2 / 3
TOTALS = ("updates", "rollouts", "tokens", "minutes", "wall_minutes")  # of an arm
SHARES = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8)


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
    minutes: Interval
    wall_minutes: Interval


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
    wall_minutes: float

    @classmethod
    def of(cls, results: Sequence[Result]) -> Spent:
        totals = (sum(getattr(one, name) for one in results) for name in ("rollouts", "tokens", "wall_minutes"))
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

    def as_dict(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return asdict(self)


def make_table(study: Study, results: Results) -> Table:
    """Return the table of a study whose arms have all ended."""
    arms = {recipe: _of(recipe, results.reported) for recipe in study.recipes}
    baselines = [arms[recipe] for recipe in study.baselines]
    starts = [one.validations[0] for one in results.reported]
    chosen = study.choose(results.tuned)
    return Table(
        cost=study.cost,
        start=fmean(one.accuracy for one in starts),
        start_levels=_over_arms([one.levels for one in starts]),
        baselines=study.baselines,
        rows=tuple(_row(own, baselines, study.cost) for own in arms.values()),
        trials=tuple(_trials(study, results.tuned, chosen)),
        edges=tuple(edge for recipe in study.recipes for edge in edges(study.grid, recipe, chosen[recipe])),
        tuning=Spent.of(results.tuned),
        reported=Spent.of(results.reported),
    )


def _of(recipe: str, results: Sequence[Result]) -> list[Result]:
    """Return the results of a recipe in the order of the seeds."""
    return sorted((one for one in results if one.recipe == recipe), key=lambda one: one.seed)


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


def _trials(study: Study, tuned: Sequence[Result], chosen: Mapping[str, Values]) -> Iterator[Trial]:
    for recipe in study.recipes:
        for settings, accuracy in study.trials(recipe, tuned):
            yield Trial(recipe, settings, accuracy, settings == chosen[recipe])
