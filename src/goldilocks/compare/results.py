"""The result of an arm, stored as JSON: what it spent and trained, and its accuracy at each validation.

A curve maps cost to accuracy, sorted by cost. Two validations can have the same cost, since an update may train what an
earlier one generated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from goldilocks.compare.arm import Arm, EqualCost, Values
from goldilocks.dotted_keys import value_at
from goldilocks.runs.costs import COST_NAMES, EPOCHS, Spending, spending, updates_per_line
from goldilocks.runs.files import Lines
from goldilocks.runs.history import History, validation_accuracy
from goldilocks.runs.progress import SCORE
from goldilocks.runs.validation import by_column

Curve = Mapping[float, float]
Levels = Mapping[str, Mapping[str, float]]  # accuracies by column and value
INFORMATIVE, SIGNAL = "train/informative_groups", "train/signal"


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
    minutes: float
    accuracy: float
    levels: Levels = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """A finished arm. ``minutes`` are those of its updates, ``wall_minutes`` those from its start to its end.

    ``epochs`` is how often each group is trained, of which ``informative_groups`` and ``signal`` count one.
    """

    recipe: str
    seed: int
    settings: Values
    validations: tuple[Validation, ...]
    updates: int
    rollouts: float
    tokens: float
    minutes: float
    wall_minutes: float
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

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        """Restore a result from ``as_dict``."""
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
        wall_minutes=wall_seconds / 60,
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
