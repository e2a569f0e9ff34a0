"""A study: the recipes, the cost of each run, the number of seeds, the grid of tuning, and the study's folder.

Every recipe is tuned over the same grid, with seeds that are not reported; its best values are run over the other
seeds. ``one-at-a-time`` tries the values of the first key, the others at the middle of their lists; then those of the
second key with the best of the first, and so on. The folder has ``study.json``, a run directory for each arm, and in it
``result.json`` once the arm has ended: what it spent and trained, and its accuracy at each validation. Invariants: a
result is whole or not there; what is in the folder belongs to one study; one process works in it.

A curve maps cost to accuracy, sorted by cost. Two validations can have the same cost, since an update may train what an
earlier one generated.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from goldilocks.config.recipes import name_of
from goldilocks.dotted_keys import value_at
from goldilocks.errors import require
from goldilocks.lab.compare.arm import Arm, EqualCost, Grid, Values, combinations
from goldilocks.runs.costs import COST_NAMES, EPOCHS, Spending, spending, updates_per_line
from goldilocks.runs.files import Lines, write_text
from goldilocks.runs.history import History, by_column, validation_accuracy
from goldilocks.runs.progress import SCORE

TUNING_SEED = 1_000
GRID, ONE_AT_A_TIME = ORDERS = ("grid", "one-at-a-time")  # how tuning goes through the grid
Curve = Mapping[float, float]
Levels = Mapping[str, Mapping[str, float]]  # accuracies by column and value
INFORMATIVE, SIGNAL = "train/informative_groups", "train/signal"


@dataclass(frozen=True)
class Study:
    """The settings. ``against`` names the baselines; none named: the first recipe."""

    recipes: tuple[str, ...]
    cost: EqualCost
    seeds: int
    overrides: tuple[str, ...] = ()
    grid: Grid = field(default_factory=dict)
    tune_cost: EqualCost | None = None
    tune_seeds: int = 1
    tune_order: str = GRID
    against: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.recipes:
            raise ValueError("which recipes? goldilocks compare RECIPE RECIPE … --budget rollouts=N --seeds K")
        names = [name_of(recipe) for recipe in self.recipes]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is named twice; name each recipe once")
        require(1 <= self.seeds < TUNING_SEED, "--seeds", self.seeds, f"1 to {TUNING_SEED - 1}")
        require(self.tune_seeds >= 1, "--tune-seeds", self.tune_seeds, "1 or more")
        require(self.tune_order in ORDERS, "--tune-order", self.tune_order, " or ".join(ORDERS))
        unknown = next((name for name in self.against if name_of(name) not in names), None)
        require(unknown is None, "--against", unknown, f"recipes of the study: {', '.join(names)}")

    @property
    def combinations(self) -> list[dict[str, str]]:
        """Return the combinations that tuning tries for every recipe; a single one is not tried."""
        return combinations(self.grid)

    @property
    def baselines(self) -> tuple[str, ...]:
        """Return the recipes that the others are held against, each once."""
        named = dict.fromkeys(map(name_of, self.against)) or [name_of(self.recipes[0])]
        return tuple(recipe for name in named for recipe in self.recipes if name_of(recipe) == name)

    @property
    def tuning_cost(self) -> EqualCost:
        return self.tune_cost or self.cost

    @property
    def arms(self) -> int:
        """Return the number of runs, tuning included."""
        return self.number_of_tries + len(self.recipes) * self.seeds

    @property
    def number_of_tries(self) -> int:
        """Return the number of tuning runs; the values of the later ones may not be known yet."""
        sizes = [len(values) for values in self.grid.values()]
        of_recipe = math.prod(sizes) if self.tune_order == GRID else 1 + sum(size - 1 for size in sizes)
        return len(self.recipes) * self.tune_seeds * of_recipe if of_recipe > 1 else 0

    def tuning_arms(self, tuned: Sequence[Result] = ()) -> list[Arm]:
        """Return the tuning arms to run next, after these results; empty when tuning is over."""
        if not self.number_of_tries:
            return []
        known = {(one.recipe, one.seed, tuple(one.settings.items())) for one in tuned}
        tries = {recipe: self.tries(recipe, tuned) for recipe in self.recipes}
        return [
            self._tuning_arm(recipe, settings, seed)
            for seed in range(TUNING_SEED, TUNING_SEED + self.tune_seeds)
            for place in range(max(map(len, tries.values())))
            for recipe, own in tries.items()
            for settings in own[place : place + 1]
            if (recipe, seed, tuple(settings.items())) not in known
        ]

    def _tuning_arm(self, recipe: str, settings: Values, seed: int) -> Arm:
        number = 1 + self.combinations.index(dict(settings))
        return Arm(f"tune-{name_of(recipe)}-{number}-seed{seed}", recipe, seed, settings, self.tuning_cost)

    def tries(self, recipe: str, tuned: Sequence[Result] = ()) -> list[dict[str, str]]:
        """Return the combinations to try for a recipe, as far as these results decide them."""
        if self.tune_order == GRID:
            return self.combinations
        best = {key: values[(len(values) - 1) // 2] for key, values in self.grid.items()}
        found: list[dict[str, str]] = []
        for key, values in self.grid.items():
            line = [{**best, key: value} for value in values]
            found += [one for one in line if one not in found]
            trials = self._means(recipe, line, tuned)
            if len(trials) < len(line):
                break
            best = dict(max(trials, key=lambda trial: trial[1])[0])
        return found

    def reported_arms(self, chosen: Mapping[str, Values]) -> list[Arm]:
        """Return an arm for every recipe and seed, seed by seed, so that half a study already compares something."""
        return [
            Arm(f"{name_of(recipe)}-seed{seed}", recipe, seed, chosen[recipe], self.cost)
            for seed in range(1, self.seeds + 1)
            for recipe in self.recipes
        ]

    def trials(self, recipe: str, tuned: Sequence[Result]) -> list[tuple[Values, float]]:
        """Return the combinations that were tried for a recipe, each with its mean accuracy over the tuning seeds."""
        return self._means(recipe, self.tries(recipe, tuned), tuned)

    def _means(self, recipe: str, tries: Sequence[Values], tuned: Sequence[Result]) -> list[tuple[Values, float]]:
        own = [result for result in tuned if result.recipe == recipe]
        tried = ([one for one in own if one.settings == settings] for settings in tries)
        return [(ones[0].settings, fmean(one.accuracy_at(self.tuning_cost) for one in ones)) for ones in tried if ones]

    def choose(self, tuned: Sequence[Result]) -> dict[str, Values]:
        """Return for each recipe its most accurate combination, the first of equals."""
        untried = [(self.combinations[0], 0.0)]
        trials = {recipe: self.trials(recipe, tuned) or untried for recipe in self.recipes}
        return {recipe: max(own, key=lambda trial: trial[1])[0] for recipe, own in trials.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return what decides the arms, as JSON values. The baselines decide only how they are shown."""
        grid = {key: list(values) for key, values in self.grid.items()}
        values = {**asdict(self), "recipes": list(self.recipes), "overrides": list(self.overrides), "grid": grid}
        return {key: value for key, value in values.items() if key != "against"}


class StudyFolder:
    """``with StudyFolder.open(path, study) as folder: …``"""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, study: Study) -> Iterator[StudyFolder]:
        """Begin or continue the study here. A folder of another study, or one in use, is an error."""
        path.mkdir(parents=True, exist_ok=True)
        with (path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"--out={str(path)!r}: another goldilocks compare is running there") from None
            folder = cls(path)
            folder._claim(study)
            yield folder

    def _claim(self, study: Study) -> None:
        file, settings = self.path / "study.json", study.as_dict()
        if not file.exists():
            write_json(file, settings)
        known = {"tune_order": GRID, **json.loads(file.read_text())}  # which older studies do not name
        differing = [key for key in settings if known.get(key) != settings[key]]
        if differing:
            pairs = [(key, json.dumps(known.get(key)), json.dumps(settings[key])) for key in differing]
            said = "; ".join(f"{key} is {old}, not {new}" for key, old, new in pairs)
            raise ValueError(f"--out={str(self.path)!r} has another study: {said}. Choose another --out")

    def run(self, arm: Arm) -> Path:
        return self.path / arm.name

    def result(self, arm: Arm) -> Result | None:
        """Return the arm's result, or None if the arm has not ended."""
        file = self.run(arm) / "result.json"
        return Result.from_dict(json.loads(file.read_text())) if file.exists() else None

    def clear(self, arm: Arm) -> None:
        """Delete an unfinished arm: it starts again from its beginning."""
        if self.run(arm).exists():
            shutil.rmtree(self.run(arm))

    def finish(self, arm: Arm, result: Result) -> None:
        """Write the result of an arm that has ended."""
        self.run(arm).mkdir(parents=True, exist_ok=True)
        write_json(self.run(arm) / "result.json", asdict(result))


def write_json(file: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all."""
    write_text(file, json.dumps(value, indent=2) + "\n")


def curve(points: Iterable[tuple[float, float]]) -> Curve:
    """Make a curve from pairs of cost and accuracy in the order of time; of two at the same cost the later counts."""
    return dict(sorted(dict(points).items()))


def at(line: Curve, cost: float) -> float | None:
    """Return the accuracy at a cost, on straight lines between validations, or None outside the curve."""
    inside = min(line, default=math.inf) <= cost <= max(line, default=-math.inf)
    return float(np.interp(cost, list(line), list(line.values()))) if inside else None


@dataclass(frozen=True)
class Validation:
    """An accuracy, the same by the columns of ``goldilocks.validate_by``, and what had been spent by then."""

    rollouts: float
    tokens: float
    seconds: float
    accuracy: float
    levels: Levels = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """A finished arm. ``seconds`` are those of its updates, ``wall_seconds`` those from its start to its end.

    ``epochs`` is how often each group is trained, of which ``informative_groups`` and ``signal`` count one.
    """

    recipe: str
    seed: int
    settings: Values
    validations: tuple[Validation, ...]
    updates: int
    rollouts: float
    tokens: float
    seconds: float
    wall_seconds: float
    informative_groups: float
    signal: float
    epochs: int = 1

    def curve(self, kind: str) -> Curve:
        """Return accuracy against a cost."""
        return curve((getattr(one, kind), one.accuracy) for one in self.validations)

    def accuracy_at(self, cost: EqualCost) -> float:
        """Return the accuracy at a cost that the arm has reached, interpolated between validations."""
        return self._at(cost, [one.accuracy for one in self.validations])

    def levels_at(self, cost: EqualCost) -> Levels:
        """Return the accuracies by column at a cost that the arm has reached; empty where they were not logged."""
        first, *later = [one.levels for one in self.validations]
        return {
            column: {
                value: self._at(cost, [one.levels[column][value] for one in self.validations])
                for value in own
                if all(value in one.get(column, {}) for one in later)
            }
            for column, own in first.items()
        }

    def _at(self, cost: EqualCost, accuracies: Iterable[float]) -> float:
        costs = (getattr(one, cost.kind) for one in self.validations)
        value = at(curve(zip(costs, accuracies, strict=True)), cost.amount)
        assert value is not None, f"{self.recipe}, seed {self.seed}, has no validation at or beyond {cost}"
        return value

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        return cls(**{**values, "validations": tuple(Validation(**one) for one in values["validations"])})


@dataclass(frozen=True)
class Results:
    """Every arm of a study that has ended."""

    tuned: tuple[Result, ...]
    reported: tuple[Result, ...]


def read_result(arm: Arm, path: Path, wall_seconds: float) -> Result:
    """Return the result of the arm in this run directory. An arm that ended before its budget is an error."""
    history = History.of(Lines(path / "metrics.jsonl"))
    spent = spending(history, {})
    reached = spent.total(arm.cost.kind) or 0.0
    if reached < arm.cost.amount:
        raise ValueError(
            f"arm {arm.name} ended after {reached:,g} of {arm.cost}: "
            "trainer.total_training_steps or trainer.total_epochs ended it before its budget did"
        )
    config = _config(path / "config.yaml")
    return Result(
        recipe=arm.recipe,
        seed=arm.seed,
        settings=dict(arm.settings),
        validations=tuple(_validations(history, spent)),
        updates=len(history.series(SCORE)) * updates_per_line(config),
        **{kind: spent.total(kind) or 0.0 for kind in COST_NAMES},
        wall_seconds=wall_seconds,
        informative_groups=sum(history.series(INFORMATIVE).values()),
        signal=sum(history.series(SIGNAL).values()),
        epochs=value_at(config, EPOCHS) or 1,
    )


def _config(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text(encoding="utf-8")) or {} if file.is_file() else {}


def _validations(history: History, spent: Spending) -> Iterator[Validation]:
    for step, data in history.steps.items():
        accuracy = validation_accuracy(data)
        if accuracy is not None:
            costs = {kind: spent.until(kind, step) or 0.0 for kind in COST_NAMES}
            yield Validation(**costs, accuracy=accuracy, levels=by_column(data))
