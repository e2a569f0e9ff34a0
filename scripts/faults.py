"""A run is killed again and again, goes on each time by the same command, and is checked at its end.

    python scripts/faults.py --kills 50 --seed 1
    python scripts/faults.py --kills 10 --seed 2 --out campaigns/2      # several side by side, each in its own folder
    python scripts/faults.py --sum campaigns/*                          # and one table of all
    python scripts/faults.py --trainer trl --kills 20                   # a run on TRL, which is one process

Each life of the run ends with SIGKILL to one process, the driver, the task runner, a training worker, the rollout
server or an agent loop worker: either at a random moment after that process has appeared, or at a random moment after
the first step of this life. A run on TRL is one process; a third of its kills fall into the writing of a checkpoint.
After every life nothing of the run may be left running and the reason must be named. At
the end, over all lives together: no group was trained twice, no kept group was lost, the accounts go on where they
were, and every step is there. The exit status is 1 if one of these does not hold. A campaign that was interrupted goes
on if it is started with the same ``--out``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from fault_checks import checkpointed, history_faults, is_saving, last_logged

from goldilocks.launch.supervisor import processes_of
from goldilocks.runs.files import read_objects, write_text

# What is killed, by a part of its command line; Ray names a worker by its actor.
VICTIMS = {
    "driver": "goldilocks.launch.train",
    "task runner": "ray::TaskRunner",
    "worker": "ray::WorkerDict",
    "server": "ray::RolloutServer",
    "agent loop": "ray::StreamingWorker",
}
ON_TRL = {"trainer": "goldilocks.launch.train"}
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


PATIENCE_S = 300.0  # for a run to end after a kill
FAILED = "the run failed: "
Found = TypeVar("Found")


@dataclass(frozen=True)
class Plan:
    """Which process a life will lose, and when."""

    victim: str
    training: bool  # whether the moment counts from the first step of the life, or from the process's first sight
    moment: float  # seconds
    saving: bool = False  # whether it is then put off until a checkpoint is being written


@dataclass(frozen=True)
class Life:
    """From one start to the next kill."""

    victim: str
    training: bool
    moment: float
    first: int  # the step it went on from
    last: int  # the last step it has logged
    reason: str  # empty if it named none, or did not end
    left_running: int
    seconds: float
    saving: bool = False


def main() -> int:
    args = _arguments()
    if args.sum:
        return summary(args.sum)
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        return campaign(args.out or Path(folder), args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--within", type=float, default=20.0, help="seconds in which a process is killed, after it "
        "appears or after the first step (default %(default)s)")  # fmt: skip
    parser.add_argument("--trainer", choices=["verl", "trl"], default="verl", help="who trains (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no life after so long (default: no limit)")
    parser.add_argument("--out", type=Path, help="where the run's directory goes and stays (default: a temporary one)")
    parser.add_argument("--sum", type=Path, nargs="+", metavar="OUT", help="print the table of these campaigns instead")
    return parser.parse_args()


def campaign(out: Path, args: argparse.Namespace) -> int:
    """Kill as often as asked for, let the run come to its end, and check it; return 1 if a check fails."""
    run, deadline = out / "faults", time.monotonic() + 60 * args.minutes
    out.mkdir(parents=True, exist_ok=True)
    lives = lives_of(out)
    print(f"{'life':>4}  {'killed':<12} {'after':>7} {'of':<8}  {'steps':<9} {'time':>6}  reason", flush=True)
    while len(lives) < args.kills and time.monotonic() < deadline:
        draw = plan if args.trainer == "verl" else plan_on_trl
        lives.append(live(run, draw(args.seed, len(lives), args.within), args.trainer))
        with (out / "lives.jsonl").open("a") as file:
            file.write(json.dumps(asdict(lives[-1])) + "\n")
        show(len(lives), lives[-1])
    total = checkpointed(run) + 2
    done = subprocess.run(command(run, args.trainer, total), capture_output=True, text=True, check=False)
    print(f"then to its end: {total} steps, status {done.returncode}", flush=True)
    checks = {"steps": total, "faults": faults(run, lives, done, total)}
    write_text(out / "checks.json", json.dumps(checks))
    return summary([out])


def plan(seed: int, number: int, within: float) -> Plan:
    """Draw a plan, the same for each life of a seed however often a campaign is interrupted."""
    draw = random.Random(f"{seed}, life {number}")
    return Plan(draw.choice(list(VICTIMS)), draw.random() < 0.5, draw.uniform(0, within))


def plan_on_trl(seed: int, number: int, within: float) -> Plan:
    """Draw a plan; a third of the lives ends while it starts, a third in training, a third while it saves."""
    draw = random.Random(f"{seed}, life {number}, on TRL")
    when = draw.choice(["start", "training", "saving"])
    return Plan("trainer", when != "start", draw.uniform(0, within), saving=when == "saving")


def command(run: Path, trainer: str, steps: int = 1_000_000) -> list[str]:
    """Return the command of every life; only the last one has a number of steps."""
    words = ["dapo", f"trainer={trainer}", *SETTINGS, f"trainer.total_training_steps={steps}"]
    return [sys.executable, "-m", "goldilocks.cli", "train", *words, "--name", run.name, "--runs", str(run.parent)]


# -- a life ------------------------------------------------------------------------------------------------------------


def live(run: Path, plan: Plan, trainer: str) -> Life:
    """Start the run, kill its process, and wait for the end."""
    started, first = time.monotonic(), checkpointed(run)
    process = subprocess.Popen(command(run, trainer), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if plan.training:
        wait_for(lambda: checkpointed(run) > first, process, "a step")
    # The process is held from its first sight on: Ray renames it with every method that it runs.
    target = wait_for(lambda: victim(run, plan.victim), process, f"a {plan.victim}")
    time.sleep(plan.moment)
    if plan.saving:
        wait_for(lambda: is_saving(run), process, "a checkpoint in the making", every=0.001)
    while not killed(target):
        target = wait_for(lambda: victim(run, plan.victim), process, f"another {plan.victim}")
    reason, left = end(run, process)
    last, seconds = last_logged(run, first), time.monotonic() - started
    return Life(plan.victim, plan.training, plan.moment, first, last, reason, left, seconds, plan.saving)


def wait_for(there: Callable[[], Found | None], process: subprocess.Popen[str], what: str, every: float = 0.1) -> Found:
    """Return what ``there`` finds as soon as it finds something; it is called ``every`` so many seconds."""
    while not (found := there()):
        if process.poll() is not None:
            raise SystemExit(f"the run ended before there was {what}: {process.communicate()[1]}")
        time.sleep(every)
    return found


def killed(target: psutil.Process) -> bool:
    """Kill a process; return False if it had ended before."""
    with contextlib.suppress(psutil.NoSuchProcess):
        target.kill()
        return True
    return False


def victim(run: Path, name: str) -> psutil.Process | None:
    """Return the process of that name, if it is there."""
    return next((found for found in processes(run) if is_one(found, (VICTIMS | ON_TRL)[name])), None)


def end(run: Path, process: subprocess.Popen[str]) -> tuple[str, int]:
    """Return the reason that a life has named and how many of its processes were left, which are ended here."""
    try:
        _, error = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _, error = process.communicate()
    left = processes(run)
    for found in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.kill()
    return named(error), len(left)


def named(error: str) -> str:
    """Return the line that names the reason, whatever libraries have printed before it; else the first one."""
    lines = error.strip().splitlines() or [""]
    return next((line for line in lines if FAILED in line), lines[0])


def is_one(process: psutil.Process, part: str) -> bool:
    """Return whether this is the process of that name, and not one that it has forked, which looks the same."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return part in " ".join(process.cmdline()) and (parent is None or part not in " ".join(parent.cmdline()))
    return False


def processes(run: Path) -> list[psutil.Process]:
    """Return everything alive of the run."""
    return list(processes_of(run.resolve()))


# -- the tables --------------------------------------------------------------------------------------------------------


def lives_of(out: Path) -> list[Life]:
    """Return the lives that a campaign has had."""
    file = out / "lives.jsonl"
    return [Life(**life) for life in read_objects(file)] if file.exists() else []


def show(number: int, life: Life) -> None:
    since = "saving" if life.saving else "training" if life.training else "its life"
    steps = f"{life.first}-{life.last}"
    print(
        f"{number:>4}  {life.victim:<12} {life.moment:>5.1f} s {since:<8}  {steps:<9} {life.seconds:>4.0f} s  "
        f"{brief(life.reason)}",
        flush=True,
    )


def brief(reason: str) -> str:
    """Return the beginning of a reason, and the actor that Ray says has died."""
    told = reason.partition(FAILED)[2] or reason
    dead = re.search(r"class_name: \w+", told)
    return f"{told[:60]} … {dead[0]}" if dead and len(told) > 60 else told[:100]


def summary(folders: list[Path]) -> int:
    """Print the kills of some campaigns by process, and their faults; return 1 if there is one."""
    lives = [life for out in folders for life in lives_of(out)]
    print(f"\n{'killed':<12} {'lives':>6} {'in training':>12} {'steps made':>11} {'mean time':>10}")
    for name in [*dict.fromkeys(life.victim for life in lives), "all"]:
        of = [life for life in lives if name in (life.victim, "all")]
        steps, seconds = sum(max(0, life.last - life.first) for life in of), sum(life.seconds for life in of)
        mean = f"{seconds / len(of):.0f} s" if of else "-"
        print(f"{name:<12} {len(of):>6} {sum(life.training for life in of):>12} {steps:>11} {mean:>10}")
    if saving := sum(life.saving for life in lives):
        print(f"killed while a checkpoint was being written: {saving}")
    ended = [json.loads((out / "checks.json").read_text()) for out in folders if (out / "checks.json").exists()]
    found: Counter[str] = Counter({"campaigns not ended": len(folders) - len(ended)})
    for checks in ended:
        found.update({name: len(lines) for name, lines in checks["faults"].items()})
    print(f"\ncampaigns: {len(folders)}, steps: {sum(checks['steps'] for checks in ended)}")
    for name, count in found.items():
        print(f"{name:<28} {count}")
    for line in [line for checks in ended for lines in checks["faults"].values() for line in lines][:20]:
        print(f"  {line[:300]}")
    return int(found.total() > 0)


def faults(run: Path, lives: list[Life], done: subprocess.CompletedProcess[str], total: int) -> dict[str, list[str]]:
    """Return every fault, by check."""
    killed_after = {life.first for life in lives} | {total - 2}  # what the next life went on from
    return {
        "lives without a reason": [f"{life.victim}: {life.reason!r}" for life in lives if FAILED not in life.reason],
        "processes left running": [f"{life.victim}: {life.left_running}" for life in lives if life.left_running],
        "the last life failed": [done.stderr.strip()] if done.returncode else [],
        **(history_faults(run, total, killed_after) if not done.returncode else {}),
    }


if __name__ == "__main__":
    sys.exit(main())
