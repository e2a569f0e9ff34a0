"""Sums, differences and products of one to six digits: from problems a tiny model always solves to those it never does.

Invariant: ``a+b`` and ``b+a`` belong to the same split, so no validation sum is trained the other way round.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from goldilocks.tasks.registry import LevelTask, Problem

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


def split_key(question: str) -> str:
    """Return the key that decides the split: the operation and the operands in order, as ``a+b`` gives away ``b+a``."""
    numbers = _INTEGER.findall(question.replace("-", " "))
    return question[-2 - len(numbers[1])] + " ".join(sorted(numbers))


class Arithmetic(LevelTask):
    """The task."""

    data_source = "goldilocks/arithmetic"
    levels = LEVELS
    key = staticmethod(split_key)
