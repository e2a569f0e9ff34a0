"""What a step costs without each speed-up: every one is switched off for single steps of one run.

    python benchmarks/patches.py --device cuda --model 1.5b --seconds 480 --out patches.jsonl
    python benchmarks/patches.py --cases log-probs messages+packed-rows             # these two, the last one together
    python benchmarks/patches.py --read patches.jsonl                               # the table again

One launch of ``goldilocks train grpo`` with the load of ``trainer.py``'s ``ours filter_groups`` on our own engine: a
model of random weights (``random_task.py``) that ends its answers by chance, the longest at eight times the mean, and a
learning rate of 0. A share ``--keep`` of the prompts teaches something. A batch and a half of prompts are open at once,
more than there are slots and fewer than a step needs: they wait, and others are asked for while answers are being
written. The prompts come in the order of the data, where each stretch has its share, so that steps have like work. A
round is one step without each, in random order, with a step that has all before every second one and at the end.

A line of the table: what was switched off; seconds of a step from its begin to the next one's, and of its parts as verl
times them; the ratio to the steps with all next before and after it; the same ratio of the tokens that were written in
the step and of those that it trained, with their prompts, since no two steps have quite the same; the largest memory
that the training worker held on the GPU in the update, and its ratio; steps. Seconds and ratios are medians, with the
least and the largest ratio of the seconds. ``not asked for`` names what no process called in these steps: nothing was
measured of it.

``--out`` keeps each step as soon as it is over. ``--seconds`` ends the run, its start included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import random_task
import switched_patches as switches
import trainer

WARM_UP = [[], [switches.SINGLE_TURN], []]  # what is off in the first steps, which do not count
CASES = (
    "log-probs", "rows-by-length", "packed-rows", "messages", "single-turn",
    "messages+packed-rows", "messages+packed-rows+single-turn",
)  # fmt: skip
PARTS = {
    "gen": "gen", "old_log_prob": "old_log_prob", "adv": "adv", "update": "update_actor", "weights": "update_weights",
}  # fmt: skip
OPEN = 1.5  # prompts open at once, in batches: more than there are slots, fewer than a step needs
ALL = "all on"


@dataclass(frozen=True)
class Step:
    """What one step cost."""

    off: tuple[str, ...]
    seconds: float
    parts: dict[str, float]
    written: float  # tokens, as the next
    trained: float
    peak: int
    asked: tuple[str, ...]

    @classmethod
    def of(cls, line: str) -> Step:
        """Read a line of the file of steps."""
        found: dict[str, Any] = json.loads(line)
        return cls(**{**found, "off": tuple(sorted(found["off"])), "asked": tuple(found["asked"])})

    @property
    def case(self) -> str:
        return "+".join(self.off) or ALL


def switched_off(case: str) -> list[str]:
    """The switches of a case."""
    names = case.split("+")
    if not set(names) <= set(switches.NAMES):
        sys.exit(f"--cases {case}: expected names with + between, of {', '.join(switches.NAMES)}")
    return sorted(names)


def schedule(cases: Sequence[list[str]], rounds: int, seed: int) -> list[list[str]]:
    """What is off in each step."""
    rng = random.Random(seed)
    steps = list(WARM_UP)
    for _ in range(rounds):
        for place, case in enumerate(rng.sample(cases, len(cases))):
            steps += [case] if place % 2 else [[], case]
    return [*steps, []]


def run(args: argparse.Namespace, plan: list[list[str]], out: Path, folder: Path) -> None:
    """Train, until the plan or the time is over; each step is in ``out`` when the next begins."""
    until, shape = time.time() + args.seconds, random_task.SHAPES[args.model]
    precision = "bfloat16" if args.device == "cuda" else "float32"
    model, data, board, planned = (folder / name for name in ("model", "data", "board", "plan"))
    random_task.make_model(model, shape, args.mean, trainer.LONGEST * args.mean, precision, args.device)
    random_task.make_data(data, shape, args.keep)
    print(f"{until - time.time():.0f} s left after the model was made", file=sys.stderr, flush=True)
    board.write_bytes(bytes(switches.Board.SIZE))
    planned.write_text(json.dumps(plan))
    env = {
        **os.environ, switches.BOARD: str(board), switches.SCHEDULE: str(planned), switches.STEPS: str(out.resolve()),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.resolve()), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": switches.__name__, switches.UNTIL: str(until),
    }  # fmt: skip
    args.warm_up, args.steps = len(WARM_UP), len(plan) - len(WARM_UP) + 1
    args.words = ["data.shuffle=False", f"data.gen_batch_size={round(OPEN * args.groups)}", *args.words]
    words = trainer.words(args, trainer.Arm("ours", "filter_groups", args.keep), model, data)
    command = [sys.executable, "-m", "goldilocks.cli", "train", *words]
    done = subprocess.run([*command, "--runs", str(folder), "--name", "run"], env=env, capture_output=True, text=True)
    if done.returncode:
        log = folder / "run" / "log"
        print(done.stdout + done.stderr + (log.read_text()[-6000:] if log.exists() else ""), file=sys.stderr)


def ratios(steps: Sequence[Step], case: str, measure: str) -> list[float]:
    """Of each step of this case: the ratio to the steps with all next before and after it."""
    places = [place for place, step in enumerate(steps) if not step.off]
    found = []
    for place in (place for place, step in enumerate(steps) if step.case == case):
        before, after = [one for one in places if one < place][-1:], [one for one in places if one > place][:1]
        usual = statistics.fmean(getattr(steps[one], measure) for one in before + after or [place])
        found.append(getattr(steps[place], measure) / usual if usual else float("nan"))
    return found


def table(steps: Sequence[Step]) -> list[str]:
    """The lines to print."""
    cases = list(dict.fromkeys([ALL, *sorted((step.case for step in steps), key=lambda case: (case.count("+"), case))]))
    heads = "".join(f"{name:>13}" for name in [*PARTS, "rest"]) + f"   {'ratio':<23}{'written':>8}{'trained':>9}"
    lines = [f"{'seconds':>8}{heads}{'GiB':>8}{'ratio':>8}{'steps':>7}  without"]
    for case in cases:
        those = [step for step in steps if step.case == case]
        parts = {name: [step.parts.get(key, 0.0) for step in those] for name, key in PARTS.items()}
        rest = [step.seconds - sum(step.parts.get(key, 0.0) for key in PARTS.values()) for step in those]
        shown = "".join(f"{statistics.median(values):>13.2f}" for values in [*parts.values(), rest])
        slower = ratios(steps, case, "seconds")
        ratio = f"{statistics.median(slower):.3f} ({min(slower):.3f} to {max(slower):.3f})"
        written, trained = (statistics.median(ratios(steps, case, tokens)) for tokens in ("written", "trained"))
        memory = max(step.peak for step in those) / 2**30
        more = max(ratios(steps, case, "peak"))
        silent = sorted(set(those[0].off).difference(*(step.asked for step in those)))
        note = f"   not asked for: {', '.join(silent)}" if silent else ""
        lines.append(
            f"{statistics.median(step.seconds for step in those):>8.2f}{shown}   {ratio:<23}"
            f"{written:>8.3f}{trained:>9.3f}{memory:>8.2f}{more:>8.3f}{len(those):>7}  {case}{note}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[trainer.sizes()]
    )
    parser.add_argument("--keep", type=float, default=0.5, help="share of prompts that teach something")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600, help="the run ends after so many, with fewer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", metavar="NAME[+NAME…]", default=CASES)
    parser.add_argument("--words", nargs="*", default=[], help="settings of the run, key=value")
    parser.add_argument("--out", type=Path, default=Path("patches.jsonl"), help="a file for the figures of every step")
    parser.add_argument("--read", type=Path, help="such a file, to print its table")
    parser.set_defaults(engine="transformers")
    args = trainer.sized(parser.parse_args())
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not args.read:
        plan = schedule([switched_off(case) for case in args.cases], args.rounds, args.seed)
        args.out.write_text("")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            run(args, plan, args.out, Path(folder))
    steps = [Step.of(line) for line in (args.read or args.out).read_text().splitlines()][len(WARM_UP) :]
    if not any(not step.off for step in steps):
        sys.exit(f"--seconds={args.seconds:g}: no step after the warm-up; expected more")
    if not args.read:
        print(trainer.load(args))
    print(*table(steps), sep="\n")


if __name__ == "__main__":
    main()
