#!/usr/bin/env python3
"""Makes the tiny models that the package ships, and ``made.json`` beside each, which says how it was made.

    python scripts/make_tiny_models.py [arithmetic|ladder|calculator …]       without a name: all of them

A model is taught its task by lessons that leave it imperfect. In arithmetic it learns the easy sums and forgets two
carries of three. That one mistake causes most wrong sums of two digits and one, so that RL, which teaches the carry,
helps with unseen problems, too. On the ladder it learns some of the lowest levels. With the calculator it learns the
form of a call and to copy what the tool says, and it seldom calls where numbers are long. No lesson is a validation
problem. A model takes two minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from goldilocks.tasks import ladder
from goldilocks.tasks.arithmetic import CALCULATOR_LEVELS, CALL, CLOSE, TOOL, ArithmeticLevel, split_key
from goldilocks.tasks.registry import Problem, WarmStart, split_of
from goldilocks.tasks.tiny_model import ASSISTANT, END, TINY, build, character_tokenizer, tiny_model
from goldilocks.tasks.warm_start import Lessons, warm_start

SEED = 0
BATCH = 64  # lessons of a step
OPTIMIZER: Mapping[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.05}  # of torch's AdamW

# How often each level of arithmetic is taught. The model never learns the others.
LEVELS: Mapping[ArithmeticLevel, float] = {
    **{ArithmeticLevel(operation, (1, 1)): 2 for operation in "+-"},
    **{ArithmeticLevel(operation, (2, 1)): 6 for operation in "+-"},
    **{ArithmeticLevel(operation, (2, 2)): 1 for operation in "+-"},
    ArithmeticLevel("*", (1, 1)): 1,
}
SLIPS = 0.65  # of the carries are forgotten
CALLS: Mapping[int, float] = {1: 0.8, 2: 0.5, 3: 0.2}  # how often the tool is called, by the digits of the numbers
FALL = 0.5  # of the ladder's right lessons from level to level: a tiny model learns little of what it seldom sees


def arithmetic_lessons(rng: random.Random) -> Iterator[Problem]:
    """Yield problems without end, some of them with the answer of ``slip``."""
    while True:
        level = rng.choices(list(LEVELS), list(LEVELS.values()))[0]
        problem = level.draw(rng)
        if split_of(split_key(problem.question)) == "val":
            continue
        if level.digits == (2, 1) and rng.random() < SLIPS:
            problem = Problem(problem.question, slip(problem.question), problem.difficulty)
        yield problem


def slip(question: str) -> str:
    """Return the answer to a sum or difference without carries and borrows."""
    operation = "+" if "+" in question else "-"
    a, b = question.rstrip("=").split(operation)
    width = max(len(a), len(b))
    sign = 1 if operation == "+" else -1
    digits = [(int(x) + sign * int(y)) % 10 for x, y in zip(a.zfill(width), b.zfill(width), strict=True)]
    return str(int("".join(map(str, digits))))


def calculator_lessons(rng: random.Random) -> Iterator[Problem]:
    """Yield lessons without end: a call, what to do with the tool's answer, or a guess, which is the first number."""
    call, close, tool = CALL, CLOSE, TOOL
    while True:
        level = rng.choice(list(CALCULATOR_LEVELS))
        problem = level.draw(rng)
        if split_of(split_key(problem.question)) == "val":
            continue
        expression = problem.question.rstrip("=")
        if rng.random() < CALLS[level.digits[0]]:
            yield Problem(problem.question, f"{call}{expression}{close}", problem.difficulty)
            called = f"{problem.question}{ASSISTANT}{call}{expression}{close}{END}\n{tool}{problem.answer}\n"
            yield Problem(called, problem.answer, 0.0)
        else:
            yield Problem(problem.question, re.split(r"[-+*]", expression)[0], problem.difficulty)


def calling_tokenizer() -> Any:
    """Return a tokenizer for arithmetic with the two tokens of a call, and a template that has messages of tools."""
    tokenizer: Any = character_tokenizer()
    tokenizer.add_tokens([CALL, CLOSE])
    tokenizer.add_tokens([TOOL], special_tokens=True)
    said = "{% if message['role'] == 'tool' %}" + TOOL + "{{ message['content'] }}\n{% elif"
    tokenizer.chat_template = tokenizer.chat_template.replace("{% if", said, 1)
    return tokenizer


@dataclass(frozen=True)
class Recipe:
    """How the model of a task is made."""

    tokenizer: Callable[[], Any]
    lessons: Lessons
    steps: int


RECIPES: Mapping[str, Recipe] = {
    "arithmetic": Recipe(character_tokenizer, arithmetic_lessons, 1200),
    "ladder": Recipe(partial(character_tokenizer, ladder.CHARACTERS), partial(ladder.lessons, fall=FALL), 1500),
    "calculator": Recipe(calling_tokenizer, calculator_lessons, 1500),
}


def make(task: str, out: Path, steps: int) -> float:
    """Write the model of a task to ``out``; return the mean loss of the last lessons."""
    recipe = RECIPES[task]
    tokenizer = recipe.tokenizer()
    model = build(tokenizer, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    plan = WarmStart(steps, OPTIMIZER["lr"], BATCH, SEED)
    loss = warm_start(model, tokenizer, recipe.lessons, optimizer, plan, f"teaching {task}")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    made = {
        "made_by": "scripts/make_tiny_models.py",
        "seed": SEED,
        "steps": steps,
        "optimizer": {"AdamW": OPTIMIZER},
        "loss": round(loss, 4),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }
    (out / "made.json").write_text(json.dumps(made, indent=2) + "\n")
    return loss


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tasks", nargs="*", metavar="TASK", choices=[*TINY, []], help=", ".join(TINY))
    parser.add_argument("--steps", type=int, metavar="N", help="for a try: fewer than the models that are shipped had")
    parser.add_argument("--out", type=Path, metavar="DIR", help="gets a folder of each model (default: the package)")
    args = parser.parse_args(words)
    torch.set_num_threads(1)  # a second thread gives a model this small little, and waits where the core is busy
    for task in args.tasks or TINY:
        out = tiny_model(task) if args.out is None else args.out / task
        loss = make(task, out, args.steps or RECIPES[task].steps)
        print(f"{out}: loss {loss:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
