"""What a launch costs: CPU seconds of ``goldilocks train`` by kind of process, workers forked and not.

    python benchmarks/launch.py [--steps 2] [--each]

Two runs of the default task with a few rollouts each, and when their first step was logged. In the first, Ray's workers
are forked from a process that has imported what they need; in the second, each imports for itself. A process is looked
at five times a second (user and system time from ``/proc``), so the last moments of each are missing. ``--each`` names
the workers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from goldilocks.launch import preflight, prefork
from goldilocks.launch.prefork import HOOK, RUN
from goldilocks.launch.recipe import choose, compose_config

SMALL = [
    "data.train_batch_size=8",
    "data.val_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
]
WAYS = {"forked": {}, "each imports": {HOOK: "copy.copy"}}  # a hook of the user's own switches the forking off
INTERVAL_S = 0.2


@dataclass
class Seen:
    """A process as it was last seen."""

    kind: str
    seconds: float


def kind_of(process: psutil.Process, root: int, each: bool) -> str:
    """The command, its driver (a child forks workers, another holds Ray), a worker of Ray's, or one of Ray's own."""
    words = process.cmdline()
    line = " ".join(words).strip()  # Ray writes a worker's name over its command line
    if process.pid == root:
        return "command"
    if line.startswith("ray::"):
        return line.partition(".")[0].split()[0] if each else "workers"
    if prefork.__file__ in words:  # the raylet has it inside of a word: the command that starts a worker
        return "clients that Ray starts"
    if "goldilocks.launch.driver" in line:
        return "driver" if process.ppid() == root else "children of the driver"
    return "Ray's own"


def processes(root: int, run: Path) -> list[psutil.Process]:
    """All that is alive of a run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == root or process.environ().get(RUN) == str(run):
                found.append(process)
    return found


@dataclass
class Launched:
    """A run that has ended: seconds to its first step and to its end, and what every process cost."""

    first: float = 0.0
    first_cpu: float = 0.0
    wall: float = 0.0
    seen: dict[tuple[int, float], Seen] = field(default_factory=dict)

    @property
    def cpu(self) -> float:
        return sum(process.seconds for process in self.seen.values())


def launch(env: dict[str, str], steps: int, each: bool) -> Launched:
    """Train, and look at the run until it ends."""
    run = Launched()
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", *SMALL, f"trainer.total_training_steps={steps}", "--runs", folder, "--name", "run"]
        began, metrics = time.monotonic(), Path(folder) / "run" / "metrics.jsonl"
        command = subprocess.Popen(
            [sys.executable, "-m", "goldilocks.cli", *words], env={**os.environ, **env}, stdout=subprocess.DEVNULL
        )
        while command.poll() is None:
            for process in processes(command.pid, (Path(folder) / "run").resolve()):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    cost = Seen(kind_of(process, command.pid, each), times.user + times.system)
                    run.seen[process.pid, process.create_time()] = cost
            run.wall = time.monotonic() - began
            if not run.first and metrics.exists() and metrics.stat().st_size:
                run.first, run.first_cpu = run.wall, run.cpu
            time.sleep(INTERVAL_S)
        if command.returncode != 0:
            raise SystemExit(f"goldilocks train ended with status {command.returncode}")
        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--each", action="store_true", help="name every kind of worker")
    args = parser.parse_args()
    preflight.provide(compose_config(choose([], "cpu")))  # what the first run of a user makes is no part of a launch
    runs, costs, counts = {}, {}, {}
    for way, env in WAYS.items():
        runs[way] = launch(env, args.steps, args.each)
        seen = runs[way].seen.values()
        costs[way], counts[way] = Counter[str](), Counter(process.kind for process in seen)
        for process in seen:
            costs[way][process.kind] += process.seconds
    print(f"{'':<28}" + "".join(f"{way:>15}{'processes':>11}" for way in WAYS))
    for kind in sorted(set().union(*costs.values()), key=lambda kind: -max(cost[kind] for cost in costs.values())):
        print(f"{kind:<28}" + "".join(f"{costs[way][kind]:>15.1f}{counts[way][kind]:>11}" for way in WAYS))
    figures = {"all, CPU s": "cpu", "wall, s": "wall", "first step, CPU s": "first_cpu", "first step, wall, s": "first"}
    for name, figure in figures.items():
        print(f"{name:<28}" + "".join(f"{getattr(runs[way], figure):>15.1f}{'':>11}" for way in WAYS))


if __name__ == "__main__":
    main()
