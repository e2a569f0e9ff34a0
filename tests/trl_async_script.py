"""Asynchronous runs for ``accelerate launch``, with TRL's own child: ``python -m trl_async_script OPTIONS.json …``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import trl_async_world as asynchronous
import trl_world as world

from goldilocks.core import Exhausted
from goldilocks.rewards import judge


def grade(completion: Any, right: int, **_: Any) -> float:
    return world.reward([completion], [right])[0]


def train(options: dict[str, Any]) -> None:
    """Train to the end, and write down what every process saw."""
    out, error = Path(options.pop("out")), ""
    trainer = asynchronous.trainer(out, reward_funcs=judge(grade), **options)
    try:
        trainer.train()
    except Exhausted as raised:
        error = str(raised)
    seen = {"error": error, "losses": world.losses(trainer), "weights": world.weights(trainer).double().sum().item()}
    (out / f"seen{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    asynchronous.on_the_cpu(setattr, threads=False)
    for file in sys.argv[1:]:
        train(json.loads(Path(file).read_text()))
