"""A study: the recipes, the cost of each run, the number of seeds, and the grid of tuning.

Every recipe is tuned over the same grid, with seeds that are not reported. Its best values are run over the other
seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from goldilocks.compare.arm import Arm, EqualCost
from goldilocks.compare.grid import Grid, Values, combinations
from goldilocks.compare.result import Result
from goldilocks.errors import require
from goldilocks.recipes import name_of

TUNING_SEED = 1_000


@dataclass(frozen=True)
class Study:
    """The settings. The first recipe is the baseline."""

    recipes: tuple[str, ...]
    cost: EqualCost
    seeds: int
    overrides: tuple[str, ...] = ()
    grid: Grid = field(default_factory=dict)
    tune_cost: EqualCost | None = None
    tune_seeds: int = 1

    def __post_init__(self) -> None:
        if not self.recipes:
            raise ValueError("which recipes? goldilocks compare RECIPE RECIPE … --budget rollouts=N --seeds K")
        names = [name_of(recipe) for recipe in self.recipes]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is named twice; name each recipe once")
        if not 1 <= self.seeds < TUNING_SEED:
            raise ValueError(f"--seeds={self.seeds} is not accepted: 1 to {TUNING_SEED - 1}")
        require(self.tune_seeds >= 1, "--tune-seeds", self.tune_seeds, "1 or more")

    @property
    def combinations(self) -> list[dict[str, str]]:
        """Return the combinations that tuning tries for every recipe; a single one is not tried."""
        return combinations(self.grid)

    @property
    def tuning_cost(self) -> EqualCost:
        """Return the cost of each tuning run."""
        return self.tune_cost or self.cost

    @property
    def arms(self) -> int:
        """Return the number of runs, tuning included."""
        return len(self.tuning_arms()) + len(self.recipes) * self.seeds

    def tuning_arms(self) -> list[Arm]:
        """Return an arm for every recipe, combination and tuning seed."""
        if len(self.combinations) < 2:
            return []
        return [
            Arm(f"tune-{name_of(recipe)}-{number}-seed{seed}", recipe, seed, settings, self.tuning_cost)
            for seed in range(TUNING_SEED, TUNING_SEED + self.tune_seeds)
            for number, settings in enumerate(self.combinations, start=1)
            for recipe in self.recipes
        ]

    def reported_arms(self, chosen: Mapping[str, Values]) -> list[Arm]:
        """Return an arm for every recipe and seed, seed by seed, so that half a study already compares something."""
        return [
            Arm(f"{name_of(recipe)}-seed{seed}", recipe, seed, chosen[recipe], self.cost)
            for seed in range(1, self.seeds + 1)
            for recipe in self.recipes
        ]

    def trials(self, recipe: str, tuned: Sequence[Result]) -> list[tuple[Values, float]]:
        """Return the combinations that were tried for a recipe, each with its mean accuracy over the tuning seeds."""
        own = [result for result in tuned if result.recipe == recipe]
        tried = ([one for one in own if one.settings == settings] for settings in self.combinations)
        return [(ones[0].settings, fmean(one.accuracy_at(self.tuning_cost) for one in ones)) for ones in tried if ones]

    def choose(self, tuned: Sequence[Result]) -> dict[str, Values]:
        """Return for each recipe its most accurate combination, the first of equals."""
        untried = [(self.combinations[0], 0.0)]
        return {
            recipe: max(self.trials(recipe, tuned) or untried, key=lambda trial: trial[1])[0] for recipe in self.recipes
        }

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        grid = {key: list(values) for key, values in self.grid.items()}
        return {**asdict(self), "recipes": list(self.recipes), "overrides": list(self.overrides), "grid": grid}
