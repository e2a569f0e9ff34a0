"""The figures of a study: a pure function of the results of its arms.

Accuracy is read off each arm's validation curve at the equal cost. ``against_baseline`` is the
difference to the first recipe, seed by seed: arms of one seed have the same data in the same order, so their chance
errors cancel in part. ``cost_to_baseline`` is where the mean curve over the seeds first reaches the baseline's
accuracy at the equal cost. ``at_two_thirds`` is the accuracy at two thirds of the cost less the baseline's at
the whole cost, seed by seed: above zero beyond its interval, the recipe saves a third of the cost. ``along`` is the
difference at each of ``SHARES`` of the cost, and ``two_thirds_along`` what ``at_two_thirds`` would be had the cost been
that share: a recipe may learn sooner and end level. Yields are of what was trained over all that was generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from goldilocks.compare.arm import EqualCost
from goldilocks.compare.curve import at, cost_to_reach, mean_curve
from goldilocks.compare.grid import Values
from goldilocks.compare.interval import Interval
from goldilocks.compare.result import Result, Results
from goldilocks.compare.study import Study

TWO_THIRDS = 2 / 3
SHARES = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class RecipeRow:
    """One recipe over its seeds."""

    recipe: str
    settings: Values
    seeds: int
    accuracy: Interval
    against_baseline: Interval | None
    differences: tuple[float, ...]  # to the baseline, by seed; of the baseline itself there are none
    along: tuple[Interval, ...]  # the same at each of SHARES of the cost
    two_thirds_along: tuple[Interval, ...]
    at_two_thirds: Interval
    cost_to_baseline: float | None
    updates: Interval
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
    """The whole table. ``start`` is the mean accuracy before training."""

    cost: EqualCost
    start: float
    rows: tuple[RecipeRow, ...]
    trials: tuple[Trial, ...]
    tuning: Spent
    reported: Spent

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def make_table(study: Study, results: Results) -> Table:
    """Return the table of a study whose arms have all ended."""
    by_recipe = {recipe: _of(recipe, results.reported) for recipe in study.recipes}
    curves = {
        recipe: mean_curve([one.curve(study.cost.kind) for one in own], study.cost.amount)
        for recipe, own in by_recipe.items()
    }
    target = at(curves[study.recipes[0]], study.cost.amount)
    assert target is not None, "every arm has a validation at or beyond the equal cost"
    baseline = by_recipe[study.recipes[0]]
    rows = [_row(own, baseline, study.cost, cost_to_reach(curves[recipe], target)) for recipe, own in by_recipe.items()]
    starts = [one.validations[0].accuracy for one in results.reported]
    return Table(
        cost=study.cost,
        start=sum(starts) / len(starts),
        rows=tuple(rows),
        trials=_trials(study, results.tuned),
        tuning=Spent.of(results.tuned),
        reported=Spent.of(results.reported),
    )


def _of(recipe: str, results: Sequence[Result]) -> list[Result]:
    return [one for one in results if one.recipe == recipe]


def _differences(
    own: Sequence[Result], baseline: Sequence[Result], cost: EqualCost, share: float = 1.0, of_baseline: float = 1.0
) -> tuple[float, ...]:
    """Accuracy at a share of the cost less the baseline's at a share of it, in the order of the seeds."""
    part, its = (EqualCost(cost.kind, part * cost.amount) for part in (share, of_baseline))
    there = {one.seed: one.accuracy_at(its) for one in baseline}
    return tuple(one.accuracy_at(part) - there[one.seed] for one in sorted(own, key=lambda one: one.seed))


def _row(
    own: Sequence[Result], baseline: Sequence[Result], cost: EqualCost, cost_to_baseline: float | None
) -> RecipeRow:
    def over_seeds(value: Callable[[Result], float]) -> Interval:
        return Interval.of([value(one) for one in own])

    def along(part: float) -> tuple[Interval, ...]:
        shares = SHARES if differences else ()
        return tuple(Interval.of(_differences(own, baseline, cost, part * share, share)) for share in shares)

    differences = () if own[0].recipe == baseline[0].recipe else _differences(own, baseline, cost)
    return RecipeRow(
        recipe=own[0].recipe,
        settings=own[0].settings,
        seeds=len(own),
        accuracy=over_seeds(lambda one: one.accuracy_at(cost)),
        against_baseline=Interval.of(differences) if differences else None,
        differences=differences,
        along=along(1.0),
        two_thirds_along=along(TWO_THIRDS),
        at_two_thirds=Interval.of(_differences(own, baseline, cost, TWO_THIRDS)),
        cost_to_baseline=cost_to_baseline,
        updates=over_seeds(lambda one: one.updates),
        informative_groups_per_1k_rollouts=over_seeds(lambda one: 1e3 * one.informative_groups / one.rollouts),
        signal_per_1k_rollouts=over_seeds(lambda one: 1e3 * one.signal / one.rollouts),
        informative_groups_per_1m_tokens=over_seeds(lambda one: 1e6 * one.informative_groups / one.tokens),
        signal_per_1m_tokens=over_seeds(lambda one: 1e6 * one.signal / one.tokens),
        rollouts=over_seeds(lambda one: one.rollouts),
        tokens=over_seeds(lambda one: one.tokens),
        minutes=over_seeds(lambda one: one.minutes),
        wall_minutes=over_seeds(lambda one: one.wall_minutes),
    )


def _trials(study: Study, tuned: Sequence[Result]) -> tuple[Trial, ...]:
    chosen = study.choose(tuned)
    return tuple(
        Trial(recipe, settings, accuracy, settings == chosen[recipe])
        for recipe in study.recipes
        for settings, accuracy in study.trials(recipe, tuned)
    )
