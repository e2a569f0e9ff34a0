"""Tasks: problems with known answers and a grader, the table of them, and ``goldilocks data make TASK --out DIR``.

Invariant: the split of a problem depends on the problem alone, not on the seed, the size or the caller. So a validation
problem is never trained on, neither by a data set nor by a warm start.
"""

from __future__ import annotations

import argparse
import importlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from goldilocks.errors import require, require_known
from goldilocks.hashing import content_key
from goldilocks.runs.files import replacing

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")
VALIDATION_SHARE = 10  # one problem in this many is held out
_TRIES = 200  # draws without a new problem after which a level counts as used up

Score = dict[str, float]
# by name: (class, its data source or the beginning of its data sources, what it is)
TASKS: Mapping[str, tuple[str, str, str]] = {
    "arithmetic": ("Arithmetic", "goldilocks/arithmetic", "sums, differences and products of one to six digits"),
    "calculator": ("Calculator", "goldilocks/calculator", "arithmetic of one to three digits with a tool, on verl"),
    "sums": ("Sums", "goldilocks/sums", "arithmetic in words for a chat model, graded by the last number"),
    "ladder": (
        "Ladder",
        "goldilocks/ladder",
        "skills on rows of digits, in ten levels; the lowest can be done at first",
    ),
    "reasoning_gym": ("ReasoningGym", "reasoning_gym/", "generators of the reasoning-gym library, by name"),
    "gsm8k": ("Gsm8k", "openai/gsm8k", "grade-school word problems, from files or the hub"),
    "math": ("Math", "DigitalLearningGmbH/MATH-lighteval", "competition problems of five levels, from files"),
}
# The module of each task that has no module of its name.
MODULES = {"calculator": "arithmetic", "sums": "arithmetic", "gsm8k": "published", "math": "published"}


@dataclass(frozen=True)
class Problem:
    """A question as the model sees it, the answer that the grader expects, and a difficulty."""

    question: str
    answer: str
    difficulty: float
    extra: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """A family of problems and its grader. A row's ``data_source`` leads back to the grader."""

    data_source: str

    def problems(self, split: Split, size: int, seed: int) -> list[Problem]:
        """Return ``size`` different problems of the split, or fewer if there are no more, the same for a seed."""

    def grade(self, answer: str, truth: str, extra: Mapping[str, Any]) -> Score:
        """Return the reward of a model's answer. The answer is compared as text and never executed."""


@dataclass(frozen=True)
class WarmStart:
    """``task.warm_start``: supervised training on a task's lessons before RL."""

    steps: int
    lr: float
    batch: int  # lessons of a step
    seed: int

    def __post_init__(self) -> None:
        for key in ("steps", "batch"):
            require(getattr(self, key) >= 1, f"task.warm_start.{key}", getattr(self, key), "1 or more")
        require(self.lr > 0, "task.warm_start.lr", self.lr, "above 0")


def split_of(key: str) -> Split:
    """Return the split of the problem with this key."""
    return "val" if content_key(key) % VALIDATION_SHARE == 0 else "train"


class LevelTask:
    """A task of levels, each drawn by its share for as long as it has problems left.

    The problems of a level are about equally hard; its ``draw(rng)`` returns one, of either split. Questions with the
    same ``key`` are of the same split. An answer is right if it is the truth, with nothing but spaces around it.
    """

    data_source: str
    levels: Mapping[Any, float]
    key: staticmethod[[str], str]

    def problems(self, split: Split, size: int, seed: int) -> list[Problem]:
        """Return ``size`` different problems, or fewer if there are no more."""
        rng = random.Random(f"{self.data_source.removeprefix('goldilocks/')}/{split}/{seed}")
        chosen: dict[str, Problem] = {}
        shares = dict(self.levels)
        while len(chosen) < size and shares:
            level = rng.choices(list(shares), list(shares.values()))[0]
            for _ in range(_TRIES):
                problem = level.draw(rng)
                if problem.question not in chosen and split_of(self.key(problem.question)) == split:
                    chosen[problem.question] = problem
                    break
            else:
                del shares[level]
        return list(chosen.values())

    def grade(self, answer: str, truth: str, extra: Mapping[str, Any]) -> Score:
        """Return whether the answer is the truth."""
        return graded(answer.strip() == truth)


def graded(right: bool) -> Score:
    """Return the reward of a right or wrong answer, by the names that verl and the filters read."""
    return {"score": float(right), "acc": float(right)}


def to_row(problem: Problem, data_source: str, split: Split, index: int) -> dict[str, Any]:
    """Return one row of a verl parquet file."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": split, "difficulty": problem.difficulty, **problem.extra},
    }


def write_split(out: Path, data_source: str, split: Split, problems: Iterable[Problem]) -> Path:
    """Write ``out/<split>.parquet``, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [to_row(problem, data_source, split, index) for index, problem in enumerate(problems)]
    path = out / f"{split}.parquet"
    with replacing(path) as unfinished:
        pq.write_table(pa.Table.from_pylist(rows), unfinished)
    return path


def create(name: str, **options: Any) -> Task:
    """Return the task called ``name``; its class says which options it takes."""
    require_known("task", name, TASKS)
    return getattr(importlib.import_module(f"goldilocks.tasks.{MODULES.get(name, name)}"), TASKS[name][0])(**options)


@cache
def of_data_source(data_source: str) -> Task:
    """Return the task whose rows have this ``data_source``."""
    for name, (_, prefix, _) in TASKS.items():
        if data_source == prefix or (prefix.endswith("/") and data_source.startswith(prefix)):
            return create(name, generators=data_source.removeprefix(prefix)) if prefix.endswith("/") else create(name)
    known = ", ".join(prefix + "…" if prefix.endswith("/") else prefix for _, prefix, _ in TASKS.values())
    raise ValueError(
        f"data_source={data_source!r} has no grader here; known are {known}. For other data set "
        "reward.custom_reward_function.path"
    )


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> Score:
    """Return ``score`` and ``acc`` of an answer: verl's reward function for every task."""
    return of_data_source(data_source).grade(solution_str, ground_truth, extra_info or {})


def random_score(solution_str: str, ground_truth: str, **row: Any) -> Score:
    """Return a coin's fall as ``score`` beside the true ``acc``: the control of a study, in which nothing is taught.

    The coin falls the same way for the same answer, so that a run can be repeated.
    """
    coin = content_key([ground_truth, solution_str]) % 2
    return {**compute_score(solution_str=solution_str, ground_truth=ground_truth, **row), "score": float(coin)}


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
        path, asked = write_split(args.out, task.data_source, split, problems), getattr(args, split)
        by_difficulty = Counter(problem.difficulty for problem in problems)
        counts = ", ".join(f"{count} of difficulty {level:g}" for level, count in sorted(by_difficulty.items())[:8])
        fewer = f" (asked for {asked}: there are no more)" if len(problems) < asked else ""
        more = ", …" if len(by_difficulty) > 8 else ""
        print(f"{path}: {len(problems)} {split} problems{fewer}: {counts}{more}")
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
        named = {}
        for word in options["generators"]:  # chain_sum:max_terms=3,share=2; values are YAML
            name, _, knobs = word.partition(":")
            pairs = [knob.partition("=") for knob in knobs.split(",") if knob]
            named[name] = {key: yaml.safe_load(value) for key, _, value in pairs}
        options["generators"] = named
    return create(args.task, **options)


for _function in (compute_score, random_score):  # goldilocks.rewards asks whether a call only compares texts
    _function.is_quick = lambda data_source, **_: isinstance(of_data_source(data_source), LevelTask)  # type: ignore[union-attr]
