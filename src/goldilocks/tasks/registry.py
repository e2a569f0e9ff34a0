"""The tasks, by their name on the command line and by the ``data_source`` of a row."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

from goldilocks.errors import require_known
from goldilocks.tasks.base import Score, Task

# name, as of its module here: (class, what its data sources begin with, what it is)
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
    "gsm8k": ("Gsm8k", "openai/gsm8k", "grade-school word problems, from a file or the hub"),
}


def create(name: str, **options: Any) -> Task:
    """Return the task called ``name``; its class says which options it takes."""
    require_known("task", name, TASKS)
    return getattr(importlib.import_module(f"goldilocks.tasks.{name}"), TASKS[name][0])(**options)


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
