"""A study: the recipes, the cost of each run, the number of seeds, the grid of tuning, and the study's folder.

Every recipe is tuned over the same grid, with seeds that are not reported; its best values are run over the other
seeds. The folder has ``study.json``, a run directory for each arm, in it ``arm.json`` from the arm's beginning and
``result.json`` from its end: what it spent and trained, its accuracy at each validation, and its origin. Invariants: a
result is whole or not there; what is in the folder belongs to one study, of recipes that have not changed since; one
process works in it; a folder that no arm was begun in is left alone.

Accuracy at a cost is the mean over the last few validations, since one of them is as much luck as the differences that
are looked for. Two validations can have the same cost, since an update may train what an earlier one generated.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from goldilocks.config.recipes import name_of, read_recipe
from goldilocks.config.sections import read_section
from goldilocks.dotted_keys import value_at
from goldilocks.errors import require
from goldilocks.lab.compare.arm import VALIDATIONS, Arm, EqualCost, Grid, Values
from goldilocks.launch.preflight import rows_in
from goldilocks.runs.costs import COST_NAMES, EPOCHS, SCORE, spending, updates_per_line
from goldilocks.runs.files import Lines, held, write_text
from goldilocks.runs.history import History, by_column, validation_accuracy

TUNING_SEED = 1_000
PACKAGES = ("goldilocks-rl", "verl", "trl", "vllm", "torch", "transformers")  # whose versions an arm keeps
SHARES = tuple(1 - number / VALIDATIONS for number in range(3))  # of a cost: accuracy there is the mean at these
Origin = Callable[[], Mapping[str, str]]
Levels = Mapping[str, Mapping[str, float]]  # accuracies by column and value
SAMPLES = "actor_rollout_ref.rollout.val_kwargs.n"  # answers to each problem of a validation
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
        unknown = next((name for name in self.against if name_of(name) not in names), None)
        require(unknown is None, "--against", unknown, f"recipes of the study: {', '.join(names)}")

    @property
    def combinations(self) -> list[dict[str, str]]:
        """Return the combinations that tuning tries for every recipe; an empty grid has one, which is empty."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]

    @property
    def baselines(self) -> tuple[str, ...]:
        """Return the recipes that the others are held against, each once."""
        named = dict.fromkeys(map(name_of, self.against)) or [name_of(self.recipes[0])]
        return tuple(recipe for name in named for recipe in self.recipes if name_of(recipe) == name)

    @property
    def arms(self) -> int:
        """Return the number of runs, tuning included."""
        return len(self.tuning_arms()) + len(self.recipes) * self.seeds

    def tuning_arms(self) -> list[Arm]:
        """Return an arm for every seed of tuning, combination and recipe; a single combination is not tried."""
        if len(self.combinations) == 1:
            return []
        return [
            Arm(f"tune-{name_of(recipe)}-{number}-seed{seed}", recipe, seed, settings, self.tune_cost or self.cost)
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
        cost = self.tune_cost or self.cost
        tried = ([one for one in own if one.settings == settings] for settings in self.combinations)
        return [(ones[0].settings, fmean(one.accuracy_at(cost) for one in ones)) for ones in tried if ones]

    def choose(self, tuned: Sequence[Result]) -> dict[str, Values]:
        """Return for each recipe its most accurate combination, the first of equals."""
        untried = [(self.combinations[0], 0.0)]
        trials = {recipe: self.trials(recipe, tuned) or untried for recipe in self.recipes}
        return {recipe: max(own, key=lambda trial: trial[1])[0] for recipe, own in trials.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return what decides each arm, as JSON values: neither the baselines nor the number of seeds do."""
        grid = {key: list(values) for key, values in self.grid.items()}
        recipes = {recipe: recipe_digest(recipe) for recipe in self.recipes}
        values = {**asdict(self), "recipes": recipes, "overrides": list(self.overrides), "grid": grid}
        return {key: value for key, value in values.items() if key not in ("against", "seeds")}


def recipe_digest(recipe: str) -> str:
    """Return a digest of every key that the recipe sets, by itself or through its ``defaults:``."""
    return hashlib.sha256(json.dumps(read_recipe(recipe), sort_keys=True, default=str).encode()).hexdigest()[:12]


def origin_here(device: str) -> dict[str, str]:
    """Return what arms that run here have in common: commit, versions of the packages, and the device's name."""
    found = {"device": f"{os.cpu_count()} cores"}
    if device == "cuda":
        import torch

        found["device"] = torch.cuda.get_device_name()
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)

    def git(*words: str) -> str:
        here = ["git", "-C", str(Path(__file__).parents[2]), *words, "--", "."]
        return subprocess.run(here, capture_output=True, text=True, check=False).stdout

    if shutil.which("git") and (commit := git("log", "-1", "--format=%h").strip()):
        changes = git("diff", "HEAD")
        found["commit"] = commit + (f"+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else "")
    return found


class StudyFolder:
    """``with StudyFolder.open(path, study, origin) as folder: …``; each arm's origin is asked for when it begins."""

    def __init__(self, path: Path, origin: Origin) -> None:
        self.path, self._origin = path, origin
        self._origins: dict[str, Mapping[str, str]] = {}  # of the arms that began here

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, study: Study, origin: Origin = dict) -> Iterator[StudyFolder]:
        """Begin or continue the study here. A folder of another study, or one in use, is an error."""
        with held(path / ".lock", "--out", str(path)):
            file, settings = path / "study.json", study.as_dict()
            if not file.exists():
                write_json(file, settings)
            with told(file, "delete it if this command made all arms here, or choose another --out"):
                known = {**json.loads(file.read_text())}
            for arm in sorted(path.glob("*/arm.json")):
                if (result := arm.with_name("result.json")).exists():
                    read_whole(result)
            if differing := [key for key in settings if known.get(key) != settings[key]]:
                said = [f"{key} is {json.dumps(known.get(key))}, not {json.dumps(settings[key])}" for key in differing]
                if "recipes" in differing and list(known.get("recipes", ())) == list(settings["recipes"]):
                    said.append("a recipe was edited since the study began, and its arms would be of two recipes")
                raise ValueError(f"--out={str(path)!r} has another study: {'; '.join(said)}. Choose another --out")
            yield cls(path, origin)

    def run(self, arm: Arm) -> Path:
        return self.path / arm.name

    def result(self, arm: Arm) -> Result | None:
        """Return the arm's result, or None if the arm has not ended."""
        file = self.run(arm) / "result.json"
        return read_whole(file) if file.exists() else None

    def begin(self, arm: Arm) -> None:
        """Make the arm's folder; an unfinished arm is deleted, and anything else that is there is an error."""
        path, gone = self.run(arm), self.path / f".{arm.name}.gone"
        if path.exists():
            if any(path.iterdir()) and not (path / "arm.json").exists():
                raise ValueError(f"{str(path)!r} is no arm of this study: move it away, or choose another --out")
            shutil.rmtree(gone, ignore_errors=True)  # of a deletion that was interrupted
            path.rename(gone)
            shutil.rmtree(gone)
        path.mkdir(parents=True)
        self._origins[arm.name] = {**self._origin(), f"recipe {name_of(arm.recipe)}": recipe_digest(arm.recipe)}
        write_json(path / "arm.json", {**asdict(arm), "origin": self._origins[arm.name]})

    def finish(self, arm: Arm, result: Result) -> Result:
        """Write the result of an arm that has ended, and return it with the arm's origin."""
        result = replace(result, origin=self._origins[arm.name])
        write_json(self.run(arm) / "result.json", asdict(result))
        return result


def write_json(file: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all."""
    write_text(file, json.dumps(value, indent=2) + "\n")


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

    ``epochs`` is how often each group is trained, of which ``informative_groups`` and ``signal`` count one. ``origin``
    is what made it beside the study's settings: commit, versions, device, and the digest of its recipe. ``alone``: no
    other arm ran at the same time, so its seconds are its own.
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
    answers: int = 0  # of a validation; 0 if that is not known
    alone: bool = True
    origin: Mapping[str, str] = field(default_factory=dict)

    def accuracies(self, kind: str, costs: np.ndarray, found: Sequence[float] = ()) -> np.ndarray:
        """Return the accuracy at each cost: a mean over the last validations up to it, on straight lines between them.

        ``found`` are others than the accuracies of the validations, such as those of a level.

        Averaged over the same ``SHARES`` of every cost, a recipe that learns twice as fast has each accuracy at half
        the cost, as it has without the averaging. Of two validations at the same cost the later counts.
        """
        values = found or [one.accuracy for one in self.validations]
        spent = [getattr(one, kind) for one in self.validations]
        line = dict(sorted(dict(zip(spent, values, strict=True)).items()))
        reached = max(line)
        assert max(costs) <= reached, f"{self.recipe}, seed {self.seed}, ended after {reached:,g} {kind}"
        return np.mean([np.interp(share * costs, list(line), list(line.values())) for share in SHARES], axis=0)

    def accuracy_at(self, cost: EqualCost) -> float:
        """Return the accuracy at a cost that the arm has reached."""
        return float(self.accuracies(cost.kind, np.array([cost.amount]))[0])

    def levels_at(self, cost: EqualCost) -> Levels:
        """Return the accuracies by column at a cost that the arm has reached; empty where they were not logged."""
        found: dict[str, dict[str, float]] = {}
        for column, values in self.validations[0].levels.items():
            own = [one.levels.get(column, {}) for one in self.validations]
            for value in filter(lambda value: all(value in one for one in own), values):
                at = self.accuracies(cost.kind, np.array([cost.amount]), [one[value] for one in own])
                found.setdefault(column, {})[value] = float(at[0])
        return found


@dataclass(frozen=True)
class Results:
    tuned: tuple[Result, ...]
    reported: tuple[Result, ...]


@contextlib.contextmanager
def told(file: Path, remedy: str) -> Iterator[None]:
    """Have an error in reading a file name the file, and what to do about it."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{str(file)!r} is damaged ({type(error).__name__}: {error}): {remedy}") from None


def read_whole(file: Path) -> Result:
    """Return the result in a file, with the types that its fields have; anything else is an error."""
    with told(file, "delete it, and the same command runs its arm again"):
        values = json.loads(file.read_text())
        found = [{"validation": one} for one in values["validations"]]  # which may be NaN, as a reward may
        validations = tuple(read_section(Validation, "validation", one, finite=False) for one in found)
        return read_section(Result, "result", {"result": {**values, "validations": validations}}, finite=False)


def read_result(arm: Arm, path: Path, wall_seconds: float, *, alone: bool = True) -> Result:
    """Return the result of the arm in this run directory. An arm that ended before its budget is an error."""
    history = History.of(Lines(path / "metrics.jsonl"))
    spent = spending(history, {})
    reached = spent.total(arm.cost.kind) or 0.0
    if reached < arm.cost.amount:
        raise ValueError(
            f"arm {arm.name} ended after {reached:,g} of {arm.cost}: "
            "trainer.total_training_steps or trainer.total_epochs ended it before its budget did"
        )
    validations = []
    for step, data in history.steps.items():
        if (accuracy := validation_accuracy(data)) is not None:
            costs = {kind: spent.until(kind, step) or 0.0 for kind in COST_NAMES}
            validations.append(Validation(**costs, accuracy=accuracy, levels=by_column(data)))
    file = path / "config.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8")) or {} if file.is_file() else {}
    return Result(
        recipe=arm.recipe,
        seed=arm.seed,
        settings=dict(arm.settings),
        validations=tuple(validations),
        updates=len(history.series(SCORE)) * updates_per_line(config),
        rollouts=spent.total("rollouts") or 0.0,
        tokens=spent.total("tokens") or 0.0,
        seconds=spent.total("seconds") or 0.0,
        wall_seconds=wall_seconds,
        informative_groups=sum(history.series(INFORMATIVE).values()),
        signal=sum(history.series(SIGNAL).values()),
        epochs=value_at(config, EPOCHS) or 1,
        answers=(rows_in(value_at(config, "data.val_files") or []) or 0) * (value_at(config, SAMPLES) or 1),
        alone=alone,
    )
