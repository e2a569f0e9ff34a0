"""``goldilocks model make --task arithmetic --out DIR``: a tiny model, and how often it is right before any RL."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

TASKS = ("arithmetic",)
PROBLEMS, SAMPLES = 256, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("action", choices=["make"])
    parser.add_argument(
        "--task", choices=TASKS, default=TASKS[0], help="what it is warmed up for (default %(default)s)"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="gets the model and its tokenizer")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of its weights and of its lessons")


def run(args: argparse.Namespace) -> int:
    """Make the model, save it, and say what it can do."""
    from goldilocks.tasks.arithmetic import Arithmetic
    from goldilocks.tasks.tiny_model import make, pass_rates

    if args.out.exists() and any(args.out.iterdir()):
        raise ValueError(f"--out={args.out} is not empty; choose a new folder")
    started = time.monotonic()
    model, tokenizer = make(args.out, args.seed)
    print(f"{args.out}: {model.num_parameters():,} parameters, warmed up in {time.monotonic() - started:.0f} s")
    rates = pass_rates(model, tokenizer, Arithmetic().problems("train", PROBLEMS, seed=0), SAMPLES)
    print(histogram(rates, SAMPLES))
    return 0


def histogram(rates: list[float], samples: int) -> str:
    """How many problems are never, sometimes and always right, and the whole distribution."""
    counts = Counter(round(rate * samples) for rate in rates)
    never, always = counts[0], counts[samples]
    sometimes = len(rates) - never - always
    head = ", ".join(
        f"{name} {100 * count / len(rates):.0f}%"
        for name, count in (("never right", never), ("sometimes", sometimes), ("always", always))
    )
    widest = max(counts.values())
    bars = [
        f"  {hits}/{samples} {'█' * round(40 * counts[hits] / widest):<40} {counts[hits]}"
        for hits in range(samples + 1)
    ]
    return "\n".join([f"of {len(rates)} training problems, {samples} answers each: {head}", *bars])
