"""Training runs for ``accelerate launch``, and for processes that are killed: ``python -m trl_script OPTIONS.json …``.

Under ``accelerate launch`` the runs share their processes. Else each has a process of its own, forked from one that has
imported everything and done nothing yet.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import trl_world as world
from transformers import TrainerCallback


class KillAfter(TrainerCallback):  # type: ignore[misc]
    """Kill this process in the middle of an update, without a word to anyone."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def counted_answers(trainer: Any) -> list[int]:
    """Return a list that gets, for each evaluation, how many answers count."""
    log, counts = trainer.log, []

    def logged(*args: Any) -> None:
        counts.extend(len(ones) for name, ones in trainer._metrics["eval"].items() if name.startswith("val-core/"))
        log(*args)

    trainer.log = logged
    return counts


def train(options: dict[str, Any]) -> None:
    """Train to the end, and write down what every process saw."""
    out, resume, kill = Path(options.pop("out")), options.pop("resume", False), options.pop("kill", None)
    callbacks = [] if kill is None else [KillAfter(kill)]
    validation = world.dataset(prompts) if (prompts := options.pop("eval_prompts", 0)) else None
    trainer = world.trainer(out, callbacks=callbacks, eval_dataset=validation, **options)
    answers = counted_answers(trainer)
    trainer.train(resume_from_checkpoint=resume)
    collection = trainer.collection
    assert collection is not None
    assert collection.batch is not None
    seen = {
        "losses": world.losses(trainer),
        "weights": world.weights(trainer).double().sum().item(),
        "batch": [[group.uid, len(group), group.prompt.index] for group in collection.batch.groups],
        "rows": [len(part["advantages"]) for part in trainer._buffered_inputs],
        "metrics": collection.batch.metrics,
        "answers": answers,
    }
    (out / f"seen{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))


def train_in_a_fork(options: dict[str, Any]) -> int:
    """Return how the run ended, as ``subprocess`` says it."""
    child = os.fork()
    if child == 0:
        try:
            train(options)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    runs = [json.loads(Path(file).read_text()) for file in sys.argv[1:]]
    if "LOCAL_RANK" in os.environ:
        for run in runs:
            train(run)
    else:
        print(json.dumps([train_in_a_fork(run) for run in runs]))
