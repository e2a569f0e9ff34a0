"""What arms that run at the same time get done: rollouts a second over all of them, and where an arm's time goes.

    python benchmarks/arms.py --arms 4 --rollouts 2048 [grpo] [key=value …] [--without WHAT,WHAT | all]

Every arm is ``goldilocks train RECIPE trainer=trl`` with a seed of its own, ten validations over its budget, and no
checkpoint. All start at the same moment. With ``--without`` the same arms run once more with what is named off:

    threads     each arm has its share of the cores
    host        TRL's batch and the arithmetic of its loss stay on the host
    packing     rows with a signal come first in the micro-batches of an update
    validation  a validation computes no loss
    loader      the rows that TRL's loader would read and nobody looks at are empty
    prompts     a prompt is tokenized once for all its rollouts
    weights     the engine takes new weights over all at once

The last line is what counts: rollouts of all arms by the time from the start of the first to the end of the last.
Start is until training begins; generation is the engine's, for training; batch is the rest of making a batch, grading
and deciding among it; update is forward, backward and optimizer; validation is all of it. On a GPU work that is queued
is waited for by whatever reads a result next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from goldilocks.lab.compare.arm import ENDLESS, EPOCHS, SEEDS, STEPS, VALIDATIONS
from goldilocks.launch.machine import THREADS, find_device, share_of_cores
from goldilocks.launch.recipe import choose
from goldilocks.launch.train import Launch, prepared

SWITCHES = ("threads", "host", "packing", "validation", "loader", "prompts", "weights")
PARTS = ("start", "generation", "batch", "update", "validation", "rest")
CPU = "CPU seconds"
STARTED, WITHOUT, FOUND = "ARMS_STARTED", "ARMS_WITHOUT", "parts.json"


# -- an arm, in its own process ----------------------------------------------------------------------------------------


class Clock:
    """Seconds by part. Of parts within each other, the inner one's are its own."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inside: list[str] = []
        self._since = time.perf_counter()

    def switch(self) -> None:
        """Charge the time since the last switch to the part at work."""
        now = time.perf_counter()
        self.seconds[self._inside[-1] if self._inside else "rest"] += now - self._since
        self._since = now

    def timed(self, owner: Any, name: str, part: str) -> None:
        """Charge the calls of a method to ``part``; those within a validation are the validation's."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self._inside.append("validation" if "validation" in self._inside else part)
            try:
                return method(*args, **kwargs)
            finally:
                self.switch()
                self._inside.pop()

        setattr(owner, name, timed)


def arm(run_dir: str) -> int:
    """Train in the run directory, and leave the seconds of each part there."""
    from torch.optim import Optimizer
    from trl import GRPOTrainer

    from goldilocks.launch import driver
    from goldilocks.trl import GoldilocksGRPOTrainer
    from goldilocks.trl.engine_rollouts import EngineRollouts

    for what in filter(None, os.environ[WITHOUT].split(",")):
        UNDO.get(what, lambda: None)()
    clock = Clock()
    clock.timed(GoldilocksGRPOTrainer, "training_step", "update")
    clock.timed(GoldilocksGRPOTrainer, "_prepare_inputs", "batch")
    clock.timed(EngineRollouts, "generate", "generation")
    clock.timed(GRPOTrainer, "evaluate", "validation")
    clock.timed(Optimizer, "zero_grad", "update")
    train = GoldilocksGRPOTrainer.train

    def from_start(self: Any, *args: Any, **kwargs: Any) -> Any:
        clock.timed(self, "create_optimizer_and_scheduler", "rest")
        clock.seconds = dict.fromkeys(PARTS, 0.0) | {"start": time.time() - float(os.environ[STARTED])}
        clock._since = time.perf_counter()
        try:
            return train(self, *args, **kwargs)
        finally:
            clock.switch()

    GoldilocksGRPOTrainer.train = from_start  # type: ignore[method-assign]
    status = driver.main(run_dir)
    (Path(run_dir) / FOUND).write_text(json.dumps(clock.seconds | {CPU: time.process_time()}))
    return status


def without_host() -> None:
    _after_init(lambda trainer: setattr(trainer, "_on_host", False))


def without_validation() -> None:
    _after_init(lambda trainer: setattr(trainer, "_eval_loss", True))


def without_packing() -> None:
    from goldilocks.trl import shortcuts

    shortcuts.signal_first = lambda parts, together: list(parts)  # type: ignore[assignment]


def without_loader() -> None:
    from trl import GRPOTrainer

    from goldilocks.trl import GoldilocksGRPOTrainer

    GoldilocksGRPOTrainer.get_train_dataloader = GRPOTrainer.get_train_dataloader  # type: ignore[method-assign]


def without_prompts() -> None:
    from trl import GRPOTrainer

    from goldilocks.trl import GoldilocksGRPOTrainer

    GoldilocksGRPOTrainer._tokenize_prompts = GRPOTrainer._tokenize_prompts  # type: ignore[method-assign]


def without_weights() -> None:
    from goldilocks.engine import weights

    weights.load_all = lambda model, named: weights.load(model, named.items())


UNDO = {
    "host": without_host,
    "validation": without_validation,
    "packing": without_packing,
    "loader": without_loader,
    "prompts": without_prompts,
    "weights": without_weights,
}


def _after_init(change: Callable[[Any], None]) -> None:
    from goldilocks.trl import GoldilocksGRPOTrainer

    init: Callable[..., None] = GoldilocksGRPOTrainer.__init__

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        change(self)

    GoldilocksGRPOTrainer.__init__ = changed  # type: ignore[method-assign]


# -- all arms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """What the arms of one side did: seconds of each part by arm, rollouts and seconds of all together."""

    parts: list[dict[str, float]]
    rollouts: int
    seconds: float

    def sums(self, name: str) -> list[float]:
        """Return for each arm the seconds of all its parts, or of its processor."""
        return [own[CPU] if name == CPU else sum(own[part] for part in PARTS) for own in self.parts]


def words(given: argparse.Namespace, seed: int) -> list[str]:
    """Return the words of an arm, as ``goldilocks compare`` has them."""
    budget = [f"goldilocks.budget.rollouts={given.rollouts}", f"goldilocks.budget.validations={VALIDATIONS}"]
    return [
        *(word for word in given.words if "=" not in word),
        "trainer=trl",
        f"{STEPS}={ENDLESS}",
        f"{EPOCHS}={ENDLESS}",
        "trainer.val_before_train=True",
        "trainer.save_freq=-1",
        *budget,
        *(f"{key}={seed}" for key in SEEDS),
        *(word for word in given.words if "=" in word),
    ]


def side(given: argparse.Namespace, without: Sequence[str], folder: Path) -> Side:
    """Run all arms at the same time, to their end."""
    with ExitStack() as stack:
        device = find_device()
        launches = [
            stack.enter_context(prepared(choose(words(given, seed), device), folder, f"seed{seed}"))
            for seed in range(1, given.arms + 1)
        ]
        cores = {} if "threads" in without else share_of_cores(given.arms)
        began = time.time()
        processes = [started(launch, {**cores, **launch.env}, without) for launch in launches]
        failed = [launch for process, launch in zip(processes, launches, strict=True) if process.wait() != 0]
        seconds = time.time() - began
    if failed:
        raise SystemExit(failed[0].run_dir.log.read_text()[-3000:])
    paths = [launch.run_dir.path for launch in launches]
    return Side([json.loads((path / FOUND).read_text()) for path in paths], sum(map(rollouts, paths)), seconds)


def started(launch: Launch, env: dict[str, str], without: Sequence[str]) -> subprocess.Popen[bytes]:
    own = {STARTED: str(time.time()), WITHOUT: ",".join(without)}
    base = {name: value for name, value in os.environ.items() if name != THREADS or "threads" not in without}
    with launch.run_dir.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--arm", str(launch.run_dir.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**base, **env, **own},
        )


def rollouts(run: Path) -> int:
    records = [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return int(max(record.get("accounts/generated_rollouts", 0) for record in records))


def show(sides: dict[str, Side]) -> None:
    print(f"{'seconds of an arm, mean':<28}" + "".join(f"{name:>16}" for name in sides))
    for part in PARTS:
        means = [fmean(own[part] for own in side.parts) for side in sides.values()]
        print(f"{part:<28}" + "".join(f"{mean:>16.2f}" for mean in means))
    for name in ("all", CPU):
        means = [fmean(side.sums(name)) for side in sides.values()]
        print(f"{name:<28}" + "".join(f"{mean:>16.2f}" for mean in means))
    print(f"{'rollouts of all arms':<28}" + "".join(f"{side.rollouts:>16,}" for side in sides.values()))
    print(f"{'seconds from start to end':<28}" + "".join(f"{side.seconds:>16.1f}" for side in sides.values()))
    print(f"{'rollouts a second':<28}" + "".join(f"{side.rollouts / side.seconds:>16.1f}" for side in sides.values()))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="RECIPE | key=value")
    parser.add_argument("--arms", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=2048, help="the budget of an arm")
    parser.add_argument("--without", default="", help=f"all, or some of {','.join(SWITCHES)}")
    parser.add_argument("--arm", metavar="RUN", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    given = parsed()
    if given.arm:
        return arm(given.arm)
    without = SWITCHES if given.without == "all" else tuple(filter(None, given.without.split(",")))
    unknown = set(without) - set(SWITCHES)
    if unknown:
        raise SystemExit(f"--without={','.join(sorted(unknown))} is not known: all, or some of {','.join(SWITCHES)}")
    sides: dict[str, Side] = {}
    for name, off in {"now": (), **({f"without {given.without}"[:15]: without} if without else {})}.items():
        with tempfile.TemporaryDirectory() as folder:
            sides[name] = side(given, off, Path(folder))
        print(f"{name}: {sides[name].rollouts / sides[name].seconds:.1f} rollouts a second", flush=True)
    show(sides)
    return 0


if __name__ == "__main__":
    sys.exit(main())
