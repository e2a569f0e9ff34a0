"""A TRL run on disk as ``goldilocks report`` and ``goldilocks compare`` read it: the names and files of a verl run.

====================================  ====================================================================
``config.yaml``                       the sections with verl's keys, and TRL's arguments under ``trl``
``metrics.jsonl``                     a line for each update, and one for what TRL logged of it
``rollouts/<step>.jsonl``             the rollouts of each batch
====================================  ====================================================================
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol

import yaml
from transformers import TrainerCallback, TrainerControl, TrainerState

from goldilocks.core.source import conversation_text
from goldilocks.drive.rows import MemoryRows, Place
from goldilocks.runs.files import RunDir, set_aside
from goldilocks.runs.history import column_and_value, validated_source
from goldilocks.runs.progress import FRESH_SCORE, SCORE, SECONDS
from goldilocks.trl.collection import Batch

LENGTH = "response_length/mean"
TOTALS = ("accounts/", "data/", "budget/")
_encode = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps would make an encoder for each line

# What TRL logs, by the name that a report knows.
NAMES = {
    "loss": "actor/loss",
    "grad_norm": "actor/grad_norm",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
    "learning_rate": "actor/lr",
}


class Taken(Protocol):
    """A batch that was taken: its groups, the rows of its rollouts, and the advantage of each that is trained."""

    batch: Batch | None
    trained: dict[Place, float]

    @property
    def rows(self) -> MemoryRows[Any]:
        """Rows have a ``prompt`` and a ``completion``."""


def add_logged(logged: MutableMapping[str, list[Any]], metrics: Mapping[str, float]) -> None:
    """Add a batch's metrics to the values that TRL logs the means of; of running totals the last one counts."""
    for name, value in metrics.items():
        kept = [] if name.startswith(TOTALS) else logged[name]
        logged[name] = [*kept, float(value)]


def accuracy_name(value: str, samples: int) -> str:
    """Return verl's name for the mean of a value over a validation that has ``samples`` answers of each prompt."""
    return f"val-core/eval/{value}/mean@{samples}"


class RunRecord(TrainerCallback):
    """Writes on the first process only.

    ``spent`` is what is known after an update alone.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], spent: Callable[[], Mapping[str, float]]) -> None:
        self._run = RunDir(path)
        self._config = config
        self._spent = spent
        self._batch: dict[str, float] = {}
        self._taken: dict[int, dict[str, float]] = {}  # by step, of batches that are not being trained yet
        self._began: float | None = None

    def batch(self, step: int, collection: Taken) -> None:
        """Write the rollouts of a batch that is trained at once, and keep its metrics for the step's line."""
        self.take(step, collection)
        self.trains(step)

    def take(self, step: int, collection: Taken) -> None:
        """Write the rollouts of a new batch, and keep its metrics until it is trained."""
        batch = collection.batch
        assert batch is not None
        trained = [rollout for group in batch.groups for rollout in group.trained]  # as verl counts them
        mean = math.fsum(rollout.reward for rollout in trained) / max(1, len(trained))
        lengths = [rollout.tokens for rollout in trained]
        self._taken[step] = {**batch.metrics, SCORE: mean, LENGTH: sum(lengths) / max(1, len(lengths))}
        file = self._run.path / "rollouts" / f"{step}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w", encoding="utf-8") as out:
            out.writelines(_encode(line) + "\n" for line in _answers(step, collection))

    def trains(self, step: int) -> None:
        """Have the lines from here on show the batch of this step."""
        for taken in [one for one in self._taken if one <= step]:
            self._batch = self._taken.pop(taken)

    def begin(self) -> None:
        """Start the clock of an update, unless it runs."""
        self._began = time.monotonic() if self._began is None else self._began

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Keep what an earlier start of the run wrote, and write the configuration unless it is there."""
        self._began = None
        self._run.path.mkdir(parents=True, exist_ok=True)
        set_aside(self._run.metrics)
        if not self._run.config.exists():
            config = {**self._config, "trl": json.loads(args.to_json_string())}
            self._run.config.write_text(yaml.safe_dump(config, sort_keys=False))

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.begin()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the update's line. Several updates on one batch share its score; only the first counts its groups."""
        now = time.monotonic()
        seconds = now - (now if self._began is None else self._began)
        self._write(state.global_step, {**self._batch, **self._spent(), SECONDS: seconds})
        self._began = None
        kept = (FRESH_SCORE, "critic/", *TOTALS)
        self._batch = {name: value for name, value in self._batch.items() if name.startswith(kept)}

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """Write what only TRL knows: the loss of an update, the accuracy of an evaluation."""
        known = {NAMES[name]: value for name, value in (logs or {}).items() if name in NAMES}
        own = {name.removeprefix("eval_"): value for name, value in (logs or {}).items()}
        known |= {name: value for name, value in own.items() if validated_source(name) or column_and_value(name)}
        if known:
            self._write(state.global_step, known)

    def _write(self, step: int, data: Mapping[str, float]) -> None:
        with self._run.metrics.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"step": step, "data": dict(data)}) + "\n")


def _answers(step: int, collection: Taken) -> Iterator[dict[str, Any]]:
    """Yield a line for each rollout that is trained for the first time, in the form of verl's dumps."""
    assert collection.batch is not None
    for group in (one for one in collection.batch.groups if not one.replays):
        for rollout in group.trained:
            row = collection.rows[rollout.uid, rollout.index]
            yield {
                "input": conversation_text(row.prompt),
                "output": conversation_text(row.completion),
                "gts": None,
                "score": rollout.reward,
                "step": step,
                "uid": f"{rollout.uid}_{rollout.index}_0",
                "advantage": collection.trained[rollout.uid, rollout.index],
            }
