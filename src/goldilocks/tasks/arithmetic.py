"""Sums, differences and products of one to six digits: from problems a tiny model always solves to those it never does.

Invariant: ``a+b`` and ``b+a`` belong to the same split, so no validation sum is trained the other way round.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from goldilocks.tasks.registry import LevelTask, Problem, split_of

_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class ArithmeticLevel:
    """Problems of one operation on operands with this many digits."""

    operation: str
    digits: tuple[int, int]

    @property
    def difficulty(self) -> float:
        """Return the number of digit operations; a product has one for each pair of digits."""
        a, b = self.digits
        return float(a * b + 1 if self.operation == "*" else max(a, b))

    def draw(self, rng: random.Random) -> Problem:
        a, b = (rng.randrange(10 ** (d - 1) if d > 1 else 0, 10**d) for d in self.digits)
        answer = {"+": a + b, "-": a - b, "*": a * b}[self.operation]
        return Problem(f"{a}{self.operation}{b}=", str(answer), self.difficulty, {"operation": self.operation})


# Each level's share of a data set. For the tiny model about a third is always right, a third sometimes (two digits and
# one, with a carry), and a third never.
LEVELS: Mapping[ArithmeticLevel, float] = {
    **{ArithmeticLevel(operation, (1, 1)): 1.5 for operation in "+-"},
    **{ArithmeticLevel(operation, (2, 1)): 7 for operation in "+-"},
    **{ArithmeticLevel(operation, digits): 0.5 for operation in "+-" for digits in ((2, 2), (3, 1), (3, 3))},
    **{ArithmeticLevel(operation, (d, d)): 0.4 for operation in "+-" for d in (4, 5, 6)},
    ArithmeticLevel("*", (1, 1)): 1,
    **{ArithmeticLevel("*", digits): 0.5 for digits in ((2, 1), (2, 2), (3, 3))},
}

# How often each level is taught. The model never learns the other levels.
LESSONS: Mapping[ArithmeticLevel, float] = {
    **{ArithmeticLevel(operation, (1, 1)): 2 for operation in "+-"},
    **{ArithmeticLevel(operation, (2, 1)): 6 for operation in "+-"},
    **{ArithmeticLevel(operation, (2, 2)): 1 for operation in "+-"},
    ArithmeticLevel("*", (1, 1)): 1,
}
SLIPS = 0.65  # of the carries are forgotten in the lessons


def split_key(question: str) -> str:
    """Return the key that decides the split: the operation and the operands in order, as ``a+b`` gives away ``b+a``."""
    numbers = _INTEGER.findall(question.replace("-", " "))
    return question[-2 - len(numbers[1])] + " ".join(sorted(numbers))


def slip(question: str) -> str:
    """Return the answer without carries and borrows."""
    operation = "+" if "+" in question else "-"
    a, b = question.rstrip("=").split(operation)
    width = max(len(a), len(b))
    sign = 1 if operation == "+" else -1
    digits = [(int(x) + sign * int(y)) % 10 for x, y in zip(a.zfill(width), b.zfill(width), strict=True)]
    return str(int("".join(map(str, digits))))


def lessons(rng: random.Random) -> Iterator[Problem]:
    """Yield problems without end, some of them with the answer of ``slip``."""
    while True:
        level = rng.choices(list(LESSONS), list(LESSONS.values()))[0]
        problem = level.draw(rng)
        if split_of(split_key(problem.question)) == "val":
            continue
        if level.digits == (2, 1) and level.operation in "+-" and rng.random() < SLIPS:
            problem = Problem(problem.question, slip(problem.question), problem.difficulty)
        yield problem


class Arithmetic(LevelTask):
    """The task."""

    data_source = "goldilocks/arithmetic"
    levels = LEVELS
    key = staticmethod(split_key)
