"""Sums, differences and products of one to six digits: from what a tiny model always knows to what it never will.

Invariant: ``a+b`` and ``b+a`` are one problem when it comes to the split, so a validation sum has no twin in training.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from goldilocks.tasks.base import Problem, Score, Split, draw_levels, graded

_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Level:
    """Problems of one operation on operands with this many digits."""

    operation: str
    digits: tuple[int, int]

    @property
    def difficulty(self) -> float:
        """Digits to be worked through; a product works through each digit of one number for each of the other."""
        a, b = self.digits
        return float(a * b + 1 if self.operation == "*" else max(a, b))

    def draw(self, rng: random.Random) -> Problem:
        """One problem, of either split."""
        a, b = (rng.randrange(10 ** (d - 1) if d > 1 else 0, 10**d) for d in self.digits)
        answer = {"+": a + b, "-": a - b, "*": a * b}[self.operation]
        return Problem(f"{a}{self.operation}{b}=", str(answer), self.difficulty, {"operation": self.operation})


# Each level's share of a data set. For the tiny model: what it always knows, what it sometimes gets right (two digits
# and one, with a carry), and what is beyond it, in about equal parts.
LEVELS: Mapping[Level, float] = {
    **{Level(operation, (1, 1)): 1.5 for operation in "+-"},
    **{Level(operation, (2, 1)): 7 for operation in "+-"},
    **{Level(operation, digits): 0.5 for operation in "+-" for digits in ((2, 2), (3, 1), (3, 3))},
    **{Level(operation, (d, d)): 0.4 for operation in "+-" for d in (4, 5, 6)},
    Level("*", (1, 1)): 1,
    **{Level("*", digits): 0.5 for digits in ((2, 1), (2, 2), (3, 3))},
}


def split_key(question: str) -> str:
    """The name under which a question is held out: operands in order, since ``a+b`` gives away ``b+a``."""
    numbers = _INTEGER.findall(question.replace("-", " "))
    return question[-2 - len(numbers[1])] + " ".join(sorted(numbers))


class Arithmetic:
    """The task; every level gets its share for as long as it has problems left."""

    data_source = "goldilocks/arithmetic"

    def problems(self, split: Split, size: int, seed: int) -> list[Problem]:
        """``size`` different problems, levels in turn by their shares."""
        return draw_levels(LEVELS, split_key, split, size, random.Random(f"arithmetic/{split}/{seed}"))

    def grade(self, answer: str, truth: str, extra: Mapping[str, Any]) -> Score:
        """Right when the answer is the integer and nothing else but spaces around it."""
        return graded(answer.strip() == truth)
