"""Arithmetic in words for a chat model, from what a small one often gets right to what it cannot do.

Invariant: problems with the same numbers and operations are one problem when it comes to the split: ``3 + 5`` in the
validation set has no twin ``5 + 3`` in training.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from goldilocks.tasks.registry import LevelTask, Problem, Score, graded

QUESTION = "Calculate {}. Give the final answer as a number."
_NUMBER = re.compile(r"(?:(?<![\d)])-)?\d[\d,]*(?:\.\d+)?")  # a minus behind a digit is an operation


@dataclass(frozen=True)
class SumLevel:
    """``terms`` numbers of ``digits`` digits, with one of ``operations`` between each two."""

    terms: int
    digits: int
    operations: str

    @property
    def difficulty(self) -> float:
        """Return the number of digit operations; a product has one for each pair of digits."""
        each = self.digits**2 + 1 if self.operations == "*" else self.digits
        return float((self.terms - 1) * each)

    def draw(self, rng: random.Random) -> Problem:
        low, high = (10 ** (self.digits - 1) if self.digits > 1 else 1), 10**self.digits - 1
        numbers = [rng.randint(low, high) for _ in range(self.terms)]
        operations = [rng.choice(self.operations) for _ in numbers[1:]]
        text, answer = str(numbers[0]), numbers[0]
        for operation, number in zip(operations, numbers[1:], strict=True):
            text += f" {operation} {number}"
            answer = {"+": answer + number, "-": answer - number, "*": answer * number}[operation]
        level = f"{self.terms}x{self.digits}{self.operations}"
        return Problem(QUESTION.format(text), str(answer), self.difficulty, {"level": level})


# Each level's share of a data set. No level mixes products with sums: the order of operations is no part of this.
LEVELS: Mapping[SumLevel, float] = {
    SumLevel(2, 1, "+"): 1,
    SumLevel(2, 1, "-"): 1,
    SumLevel(2, 1, "*"): 1,
    SumLevel(3, 1, "+-"): 2,
    SumLevel(4, 1, "+-"): 2,
    SumLevel(2, 2, "+"): 2,
    SumLevel(2, 2, "-"): 2,
    SumLevel(3, 2, "+-"): 2,
    SumLevel(2, 3, "+-"): 2,
    SumLevel(2, 2, "*"): 1,
    SumLevel(3, 3, "+-"): 1,
}


def split_key(question: str) -> str:
    """Return the key that decides the split: the operations and the numbers of a question, each in order."""
    words = question.removeprefix(QUESTION.split("{}")[0]).split(". ")[0].split()
    return " ".join(sorted(words[1::2]) + sorted(words[::2]))


class Sums(LevelTask):
    """The task. An answer is right if its last number is the truth."""

    data_source = "goldilocks/sums"
    levels = LEVELS
    key = staticmethod(split_key)

    def grade(self, answer: str, truth: str, extra: Mapping[str, Any]) -> Score:
        """Return whether the last number of an answer is the truth."""
        number = last_number(answer)
        return graded(number is not None and number == float(truth))


def last_number(text: str) -> float | None:
    """Return the last number in a text; commas between digits and a typographic minus are understood."""
    found = _NUMBER.findall(text.replace("−", "-"))
    return float(found[-1].replace(",", "")) if found else None
