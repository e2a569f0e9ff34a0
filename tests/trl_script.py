"""A training run for ``accelerate launch`` and for a process that is killed: ``python -m trl_script OPTIONS.json``."""

from __future__ import annotations

import json
import os
import signal
import sys
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


def train(options: dict[str, Any]) -> None:
    """Train to the end, and write down what every process saw."""
    out, resume, kill = Path(options.pop("out")), options.pop("resume", False), options.pop("kill", None)
    callbacks = [] if kill is None else [KillAfter(kill)]
    trainer = world.trainer(out, callbacks=callbacks, **options)
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
        "guard": {} if trainer._guard is None else trainer._guard.metrics,
    }
    (out / f"seen{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text()))
