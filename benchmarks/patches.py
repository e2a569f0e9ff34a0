"""What a step costs without each patch of verl: every patch is switched off for single steps of one run.

    python benchmarks/patches.py                                        # the tiny model on the CPU, processor seconds
    python benchmarks/patches.py --device cuda --model smollm2          # seconds of the clock
    python benchmarks/patches.py --cases log-probs one-partition+group-numbers      # these two, the last one together

One launch of ``goldilocks train grpo`` with a learning rate of 0 and always the same prompts, so that every step has
the same work. A round is one step without each patch and several with all, in random order. Printed: by how much a step
without the patch exceeds its round's steps with all, as a share of these; the median over the rounds with its 95 %
interval by the bootstrap. On the CPU the measure is the processor time of the run's processes that call what the patch
replaces, which other work on the machine disturbs less than the clock; what it is a share of is that of all.

Some patches count only where a run takes a way that the default run does not take: verl's own agent loop (``loop``:
several turns, or vLLM) or a pass for old_log_probs (``passes``: several mini-batches, a gate, KL in the reward). Those
are measured against steps that take that way with all patches.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import switched_patches as switches

CLOCKS = {"cpu": "cpu", "cuda": "wall"}
TASKS = {"smollm2": "sums", "tiny": "arithmetic"}
WARM_UP = 3  # steps
WAYS = {"": (), "loop": (switches.BATCHED_TURNS,), "passes": ("one-pass",)}  # what is off to get a run onto that way

CASES = (
    "one-pass", "rows-by-length", "response-logits", "log-probs", "row-selection", "one-partition",
    "packed-rows", "group-numbers", "loop:rewards-here", "loop:gathered-puts", "passes:row-selection",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """``[WAY:]PATCH[+PATCH…]``: these patches are off, on that way; without any, a step to compare others with."""

    way: str
    patches: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Case:
        way, _, names = text.rpartition(":")
        patches = tuple(name for name in names.split("+") if name)
        if way not in WAYS or not patches or not set(patches) <= set(switches.NAMES):
            sys.exit(
                f"{text!r}: expected [{'|'.join(filter(None, WAYS))}:]PATCH[+PATCH…] of {', '.join(switches.NAMES)}"
            )
        return cls(way, patches)

    @property
    def off(self) -> list[str]:
        """The switches."""
        return sorted({*WAYS[self.way], *self.patches})


@dataclass(frozen=True)
class Step:
    """What one step cost: seconds of the clock, and of processors by process."""

    round: int
    case: Case
    wall: float
    cpu: dict[str, float]

    def seconds(self, clock: str, processes: Collection[str] | None = None) -> float:
        """By this clock; of processors, those of these processes, or of all."""
        if clock == "wall":
            return self.wall
        return sum(seconds for process, seconds in self.cpu.items() if processes is None or process in processes)


def schedule(cases: list[Case], rounds: int, seed: int) -> list[tuple[int, Case]]:
    """The case of every step, with its round; the steps of the warm-up are of round -1."""
    rng = random.Random(seed)
    steps = [(-1, Case("", ()))] * WARM_UP + [(-1, Case(way, ())) for way in {case.way for case in cases}]
    for number in range(rounds):
        ways = [case.way for case in cases]
        controls = [Case(way, ()) for way in set(ways) for _ in range(2 + ways.count(way) // 4)]
        one = [(number, case) for case in [*cases, *controls]]
        rng.shuffle(one)
        steps += one
    return steps


def words(args: argparse.Namespace, steps: int) -> list[str]:
    """The run that is measured: its prompts are those of one batch, in every step."""
    return [
        "grpo", f"task={TASKS[args.model]}", f"device={args.device}",
        f"data.train_batch_size={args.prompts}", f"data.train_max_samples={args.prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
        f"actor_rollout_ref.rollout.n={args.n}",
        "actor_rollout_ref.actor.optim.lr=0",
        f"trainer.total_training_steps={steps}", f"trainer.total_epochs={steps}",
        "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1",
        *args.words,
    ]  # fmt: skip


def run(args: argparse.Namespace, plan: list[tuple[int, Case]]) -> tuple[list[Step], dict[str, set[str]]]:
    """The steps of all rounds that the run completed, and the processes that called what each patch replaces."""
    with tempfile.TemporaryDirectory() as folder:
        names = (switches.SWITCHES, switches.SCHEDULE, switches.STEPS, switches.CALLERS)
        files = {name: Path(folder, name.lower()) for name in names}
        files[switches.SWITCHES].write_bytes(bytes(len(switches.NAMES)))
        files[switches.SCHEDULE].write_text(json.dumps([case.off for _, case in plan]))
        env = {
            **os.environ, **{name: str(path) for name, path in files.items()},
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "VERL_USE_EXTERNAL_MODULES": switches.__name__, switches.UNTIL: str(time.time() + args.seconds),
        }  # fmt: skip
        command = [sys.executable, "-m", "goldilocks.cli", "train", *words(args, len(plan) + 1)]
        done = subprocess.run([*command, "--runs", folder, "--name", "run"], env=env, capture_output=True, text=True)
        if done.returncode:
            log = Path(folder, "run", "log")
            sys.exit(done.stdout + done.stderr + (log.read_text()[-4000:] if log.exists() else ""))
        costs = [json.loads(line) for line in files[switches.STEPS].read_text().splitlines()]
        callers: dict[str, set[str]] = {}
        for line in files[switches.CALLERS].read_text().splitlines():
            callers.setdefault(line.split()[0], set()).add(line.split()[1])
    left = {number for number, _ in plan[len(costs) :]}
    steps = [Step(number, case, **cost) for (number, case), cost in zip(plan, costs, strict=False)]
    return [step for step in steps if step.round >= 0 and step.round not in left], callers


def costs(steps: list[Step], case: Case, clock: str, processes: Collection[str] | None) -> list[float]:
    """Of each round: by how much the step of this case exceeds those with all patches, as a share of the latter.

    What is compared is the time of ``processes``, what it is a share of the time of all.
    """
    found = []
    for one in (step for step in steps if step.case == case):
        alike = [step for step in steps if step.round == one.round and step.case == Case(case.way, ())]
        usual = statistics.median(step.seconds(clock, processes) for step in alike)
        whole = statistics.median(step.seconds(clock) for step in alike)
        found.append((one.seconds(clock, processes) - usual) / whole)
    return found


def interval(values: list[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the median, by the bootstrap."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def report(steps: list[Step], callers: dict[str, set[str]], cases: list[Case], clock: str) -> None:
    """Print a line for each way, and under it one for each case."""
    other = "wall" if clock == "cpu" else "cpu"
    for way in dict.fromkeys(case.way for case in cases):
        control = [step for step in steps if step.case == Case(way, ())]
        wall, cpu = (statistics.median(step.seconds(name) for step in control) for name in ("wall", "cpu"))
        print(f"\n{way or 'default'}: a step takes {wall:.3f} s, {cpu:.3f} s of processors")
        print(f"{'without':>34} {clock:>8}  {'95 %':<18} {other:>8}")
        for case in (case for case in cases if case.way == way):
            everywhere = {*case.patches} & {*switches.IN_TRAINER}
            processes = None if everywhere else set().union(*(callers.get(name, ()) for name in case.patches))
            found = costs(steps, case, clock, processes)
            spread = "[{:+.1%}, {:+.1%}]".format(*interval(found))
            beside = statistics.median(costs(steps, case, other, processes))
            note = "" if everywhere or processes else "   never called"
            print(f"{'+'.join(case.patches):>34} {statistics.median(found):>+8.1%}  {spread:<18} {beside:>+8.1%}{note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(CLOCKS), default="cpu")
    parser.add_argument("--model", choices=list(TASKS), default="tiny")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3600, help="the run ends after so many, with fewer rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", metavar="[WAY:]PATCH[+PATCH…]", default=CASES)
    parser.add_argument("--words", nargs="*", default=[], help="settings of the run, key=value")
    parser.add_argument("--out", type=Path, help="a file for the figures of every step, in JSON")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cases = [Case.of(text) for text in args.cases]
    steps, callers = run(args, schedule(cases, args.rounds, args.seed))
    if args.out:
        args.out.write_text("".join(json.dumps(dataclasses.asdict(step)) + "\n" for step in steps))
    if not steps:
        sys.exit(f"--seconds={args.seconds:g}: no round of {len(args.cases)} cases was completed; expected more")
    rounds = {step.round for step in steps}
    print(f"{args.model}, {args.device}, {args.prompts} prompts × {args.n}, {len(rounds)} rounds, {len(steps)} steps")
    report(steps, callers, cases, CLOCKS[args.device])


if __name__ == "__main__":
    main()
