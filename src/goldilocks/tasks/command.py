"""``goldilocks data make TASK --out DIR``: a data set as verl parquet files."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from goldilocks.errors import require
from goldilocks.tasks.registry import SPLITS, TASKS, Problem, Split, Task, create, write_split


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "tasks:\n" + "\n".join(f"  {name:<15} {about}" for name, (_, _, about) in TASKS.items())
    parser.add_argument("action", choices=["make"])
    parser.add_argument("task", metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="gets train.parquet and val.parquet")
    parser.add_argument("--train", metavar="N", type=int, default=2048, help="training problems (default %(default)s)")
    parser.add_argument("--val", metavar="N", type=int, default=256, help="validation problems (default %(default)s)")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="same seed, same problems")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.add_argument("--generator", metavar="NAME[:KNOB=VALUE,…]", action="append", dest="generators",
        help="reasoning_gym: a generator with its knobs; again for a mixture, in which share=N weighs it")  # fmt: skip
    parser.add_argument("--source", metavar="PATH", help="gsm8k, math: a file, or a folder of the two published "
        "splits, .parquet, .jsonl or .json (gsm8k's default: the hub)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Make the problems of both splits, write the files, and print what is in them."""
    task = _task(args)
    made: dict[Split, list[Problem]] = {}
    for split in SPLITS:
        size, file = getattr(args, split), f"{split}.parquet"
        require(size >= 1, f"--{split}", size, "1 or more")
        free = args.force or not (args.out / file).exists()
        require(free, "--out", str(args.out), f"a folder without {file} (--force replaces the file)")
        made[split] = task.problems(split, size, args.seed)
        require(bool(made[split]), "task", args.task, f"one that has problems for its {split} split")
    for split, problems in made.items():
        path = write_split(args.out, task.data_source, split, problems)
        print(f"{path}: {_summary(problems, split, getattr(args, split))}")
    return 0


def _task(args: argparse.Namespace) -> Task:
    """Return the task with its options; refuse an option of another task."""
    options: dict[str, Any] = {}
    owners = (("--generator", "generators", ("reasoning_gym",)), ("--source", "source", ("gsm8k", "math")))
    for option, key, tasks in owners:
        if (value := getattr(args, key)) is not None:
            if args.task in TASKS and args.task not in tasks:
                raise ValueError(f"{option} is not an option of task {args.task}")
            options[key] = value
    if args.task == "reasoning_gym":
        if "generators" not in options:
            raise ValueError("task reasoning_gym needs --generator NAME, such as --generator leg_counting")
        options["generators"] = dict(map(_generator, options["generators"]))
    return create(args.task, **options)


def _generator(word: str) -> tuple[str, dict[str, Any]]:
    """Parse ``chain_sum:max_terms=3,share=2`` to a name and its settings; values are YAML."""
    import yaml

    name, _, knobs = word.partition(":")
    pairs = [knob.partition("=") for knob in knobs.split(",") if knob]
    return name, {key: yaml.safe_load(value) for key, _, value in pairs}


def _summary(problems: list[Problem], split: Split, asked: int) -> str:
    """Return how many problems there are, in all and of the first eight difficulties."""
    by_difficulty = Counter(problem.difficulty for problem in problems)
    counts = ", ".join(f"{count} of difficulty {level:g}" for level, count in sorted(by_difficulty.items())[:8])
    fewer = f" (asked for {asked}: there are no more)" if len(problems) < asked else ""
    more = ", …" if len(by_difficulty) > 8 else ""
    return f"{len(problems)} {split} problems{fewer}: {counts}{more}"
