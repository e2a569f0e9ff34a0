"""An asynchronous run for ``accelerate launch``, with TRL's own child: ``python -m trl_async_script OPTIONS.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import trl_async_world as asynchronous
import trl_world as world

from goldilocks.rewards import judge


def grade(completion: Any, right: int, **_: Any) -> float:
    return world.reward([completion], [right])[0]


def main() -> None:
    """Train to the end, and write down what every process saw."""
    options = json.loads(Path(sys.argv[1]).read_text())
    out = Path(options.pop("out"))
    asynchronous.on_the_cpu(setattr, threads=False)
    trainer = asynchronous.trainer(out, reward_funcs=judge(grade), **options)
    trainer.train()
    seen = {"losses": world.losses(trainer), "weights": world.weights(trainer).double().sum().item()}
    (out / f"seen{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
