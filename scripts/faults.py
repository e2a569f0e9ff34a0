"""A run is killed again and again, goes on each time by the same command, and is checked at its end.

    python scripts/faults.py --kills 50 --seed 1

Each life of the run ends with SIGKILL to one process, the driver, the task runner, a training worker, the rollout
server or an agent loop worker, at a random moment after that process has appeared. After every life nothing of the run
may be left running and the reason must be named. At the end, over all lives together: no group was trained twice, no
kept group was lost, the accounts go on where they were, and every step is there. The exit status is 1 if one of these
does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from goldilocks.launch.supervisor import MARK
from goldilocks.runs.checkpoint import load_state
from goldilocks.runs.records import group_uids, read_records
from goldilocks.types import Account

# What is killed, by a part of its command line; Ray names a worker by its actor.
VICTIMS = {
    "driver": "goldilocks.launch.driver",
    "task runner": "ray::TaskRunner",
    "worker": "ray::WorkerDict",
    "server": "ray::RolloutServer",
    "agent loop": "ray::StreamingWorker",
}
# A small run with surplus to carry over from step to step. Nothing expires, so that whatever is kept has to be trained.
SETTINGS = [
    "data.train_batch_size=4",
    "data.gen_batch_size=16",
    "data.val_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_num_seqs=64",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    "algorithm.filter_groups.max_carry_steps=1000000",
]
CLASSES = [account.value for account in Account]


@dataclass(frozen=True)
class Life:
    """From one start to the next kill."""

    victim: str
    moment: float  # seconds after the victim appeared
    first: int  # the step it went on from
    last: int  # the last step it has logged
    reason: str
    left_running: int
    seconds: float


def main() -> int:
    args = _arguments()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        run = (args.out or Path(folder)) / "faults"
        lives: list[Life] = []
        print(f"{'life':>4}  {'killed':<12} {'after':>7}  {'steps':<9} {'time':>6}  reason", flush=True)
        while len(lives) < args.kills:
            lives.append(live(run, draw.choice(list(VICTIMS)), draw.uniform(0, args.within)))
            show(len(lives), lives[-1])
        total = checkpointed(run) + 2
        done = subprocess.run(command(run, total), capture_output=True, text=True, check=False)
        print(f"then to its end: {total} steps, status {done.returncode}", flush=True)
        return report(run, lives, done, total)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--within", type=float, default=30.0, help="seconds after a process appears in which it is "
        "killed (default %(default)s)")  # fmt: skip
    parser.add_argument("--out", type=Path, help="where the run's directory goes and stays (default: a temporary one)")
    return parser.parse_args()


def command(run: Path, steps: int = 1_000_000) -> list[str]:
    """The command of every life; only the last one knows where to end."""
    words = ["dapo", "--name", run.name, "--runs", str(run.parent), *SETTINGS, f"trainer.total_training_steps={steps}"]
    return [sys.executable, "-m", "goldilocks.cli", "train", *words]


# -- a life ------------------------------------------------------------------------------------------------------------


def live(run: Path, victim: str, moment: float) -> Life:
    """Start, kill, wait for the end."""
    started, first = time.monotonic(), checkpointed(run)
    process = subprocess.Popen(command(run), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    target = wait_for(run, victim, process)
    time.sleep(moment)
    target.kill()
    _, error = process.communicate(timeout=300)
    reason = error.strip().splitlines()[0] if error.strip() else ""
    return Life(victim, moment, first, last_logged(run, first), reason, len(processes(run)), time.monotonic() - started)


def wait_for(run: Path, victim: str, process: subprocess.Popen[str]) -> psutil.Process:
    """The victim, as soon as it is there."""
    while process.poll() is None:
        for found in processes(run):
            if is_one(found, VICTIMS[victim]):
                return found
        time.sleep(0.1)
    raise SystemExit(f"the run ended before there was a {victim}: {process.communicate()[1]}")


def is_one(process: psutil.Process, part: str) -> bool:
    """Whether this is the process of that name; what it has forked, and not started, has its command line too."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return part in " ".join(process.cmdline()) and (parent is None or part not in " ".join(parent.cmdline()))
    return False


def processes(run: Path) -> list[psutil.Process]:
    """Everything alive of the run."""
    return list(_processes(str(run.resolve())))


def _processes(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark and process.cmdline():
                yield process
        except psutil.Error:
            continue


# -- what is on disk ---------------------------------------------------------------------------------------------------


def checkpointed(run: Path) -> int:
    """The last step whose checkpoint counts."""
    file = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(file.read_text()) if file.exists() else 0


def records(run: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, metrics) of every update of every life, in the order they were written."""
    files = sorted(run.glob("metrics*.jsonl"), key=lambda file: file.stat().st_mtime_ns)
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]
    return [(line["step"], line["data"]) for line in lines if "accounts/generated_rollouts" in line["data"]]


def last_logged(run: Path, otherwise: int) -> int:
    steps = records(run)
    return steps[-1][0] if steps else otherwise


def trained(run: Path, step: int) -> list[str]:
    """The group of every row that a step trained, as the life that came last has dumped it."""
    rows = read_records(run / "rollouts" / f"{step}.jsonl")
    return [uid for uid in group_uids(rows) if not uid.startswith("pad")]


def kept(run: Path, step: int) -> set[str]:
    """The groups that the checkpoint of a step carries on."""
    state = load_state(run / "checkpoints" / f"global_step_{step}" / "goldilocks.npz")
    return {group["uid"] for group in state["collector"]["shelf"]["kept"]}


# -- the checks --------------------------------------------------------------------------------------------------------


def show(number: int, life: Life) -> None:
    steps = f"{life.first}-{life.last}"
    print(
        f"{number:>4}  {life.victim:<12} {life.moment:>5.1f} s  {steps:<9} {life.seconds:>4.0f} s  {life.reason[:110]}",
        flush=True,
    )


def report(run: Path, lives: list[Life], done: subprocess.CompletedProcess[str], total: int) -> int:
    """Print every check; 1 if one fails."""
    faults = {
        "lives without a reason": [life.victim for life in lives if "failed: " not in life.reason],
        "processes left running": [life.victim for life in lives if life.left_running],
        "the last life failed": [done.stderr.strip()] if done.returncode else [],
        **(history_faults(run, total) if not done.returncode else {}),
    }
    for name, found in faults.items():
        print(f"{name:<28} {len(found)}" + (f": {found[:3]}" if found else ""))
    return int(any(faults.values()))


def history_faults(run: Path, total: int) -> dict[str, list[str]]:
    """What does not hold over all lives together."""
    steps = {step: trained(run, step) for step in range(1, total + 1)}
    where: dict[str, int] = {}
    twice = []
    for step, uids in steps.items():
        twice += [f"{uid} in steps {where[uid]} and {step}" for uid in set(uids) if where.setdefault(uid, step) != step]
    saved = [step for step in steps if (run / "checkpoints" / f"global_step_{step}" / "goldilocks.npz").exists()]
    waiting = kept(run, total)
    lost = [f"{uid} of step {step}" for step in saved for uid in kept(run, step) - waiting if where.get(uid, 0) <= step]
    return {
        "groups trained twice": twice,
        "kept groups lost": lost,
        "accounts that do not go on": account_faults(run, {step: len(uids) for step, uids in steps.items()}),
    }


def account_faults(run: Path, rows: dict[int, int]) -> list[str]:
    """At every step the classes sum to what was generated, and as much was trained as all steps so far have dumped."""
    faults, so_far = [], 0
    metrics = dict(records(run))  # of a step that was made twice, the later one counts
    for step in sorted(rows):
        so_far += rows[step]
        if step not in metrics:  # its life was killed after the checkpoint, before the line was written
            continue
        account = {name: metrics[step][f"accounts/{name}_rollouts"] for name in (*CLASSES, "generated")}
        if sum(account[name] for name in CLASSES) != account["generated"]:
            faults.append(f"step {step}: the classes do not sum to what was generated")
        if account["trained"] != so_far:
            faults.append(f"step {step}: trained_rollouts is {account['trained']:.0f}, the dumps have {so_far}")
    return faults


if __name__ == "__main__":
    sys.exit(main())
