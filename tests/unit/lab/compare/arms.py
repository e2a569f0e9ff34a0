"""Results made by hand: an arm whose accuracy follows a line between given points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from goldilocks.lab.compare.arm import Arm, EqualCost
from goldilocks.lab.compare.study import Result, Study, Validation

BUDGET = EqualCost("rollouts", 1000)


def study(*recipes: str, seeds: int = 1, cost: EqualCost = BUDGET, **more: object) -> Study:
    return Study(recipes or ("grpo", "dapo"), cost, seeds, **more)  # type: ignore[arg-type]


def ending(end: float, start: float = 0.2) -> list[tuple[float, float]]:
    """An arm that has learnt all it learns after a tenth of the budget, and ends with this accuracy."""
    return [(0, start), (100, end), (1000, end)]


def result(
    recipe: str,
    accuracies: Sequence[tuple[float, float]] = ((0, 0.2), (100, 0.6), (1000, 0.6)),
    *,
    seed: int = 1,
    settings: Mapping[str, str] | None = None,
    updates: int = 10,
    informative: float = 50.0,
    signal: float = 80.0,
    levels: Sequence[tuple[int, float, float]] = (),
) -> Result:
    """``accuracies`` are (rollouts, accuracy), ``levels`` (level, first, last).

    A rollout has ten tokens and takes a tenth of a millisecond.
    """
    spent = max(rollouts for rollouts, _ in accuracies)
    validations = tuple(
        Validation(x, 10 * x, x / 1e4, accuracy, {"level": own} if (own := _levels(levels, begun=x > 0)) else {})
        for x, accuracy in accuracies
    )
    return Result(
        recipe, seed, settings or {}, validations, updates, spent, 10 * spent, spent / 1e4, 120.0, informative, signal
    )


def _levels(levels: Sequence[tuple[int, float, float]], *, begun: bool) -> dict[str, float]:
    return {str(level): last if begun else first for level, first, last in levels}


def of_arm(arm: Arm, final: float) -> Result:
    """What an arm with this accuracy at its end leaves."""
    accuracies = ((0.0, 0.2), (1.0, final), (arm.cost.amount + 8, final))
    return result(arm.recipe, accuracies, seed=arm.seed, settings=dict(arm.settings))
