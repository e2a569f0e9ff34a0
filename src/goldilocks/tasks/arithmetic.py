"""Arithmetic, in three tasks: for a tiny model, in words for a chat model, and with a calculator that a model may call.

``arithmetic`` has sums, differences and products of one to six digits: from problems that a tiny model always solves to
those it never does. ``sums`` goes from what a small chat model often gets right to what it cannot do. In ``calculator``
a right answer to most problems needs the tool: the tiny model knows the form of a call and copies what the tool says,
but seldom calls where numbers are long, and RL has to teach when to call.

Invariants: problems with the same numbers and operations are of the same split, so no validation sum is trained the
other way round. What a model writes is parsed by a grammar of numbers and three operations, and never executed.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from goldilocks.errors import require
from goldilocks.tasks.registry import LevelTask, Problem, Score, graded

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
        text = f"{a}{self.operation}{b}"
        return Problem(f"{text}=", str(calculate(text)), self.difficulty, {"operation": self.operation})


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
    data_source = "goldilocks/arithmetic"
    levels = LEVELS
    key = staticmethod(split_key)


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
        rest = (f" {operation} {number}" for operation, number in zip(operations, numbers[1:], strict=True))
        text = "".join([str(numbers[0]), *rest])
        level = f"{self.terms}x{self.digits}{self.operations}"
        return Problem(QUESTION.format(text), str(calculate(text)), self.difficulty, {"level": level})


# Each level's share of a data set. No level mixes products with sums: the order of operations is no part of this.
SUM_LEVELS: Mapping[SumLevel, float] = {
    **{SumLevel(2, 1, operation): 1 for operation in "+-*"},
    **{SumLevel(terms, 1, "+-"): 2 for terms in (3, 4)},
    **{SumLevel(2, 2, operation): 2 for operation in "+-"},
    **{SumLevel(terms, digits, "+-"): 2 for terms, digits in ((3, 2), (2, 3))},
    SumLevel(2, 2, "*"): 1,
    SumLevel(3, 3, "+-"): 1,
}


def sum_key(question: str) -> str:
    """Return the key that decides the split: the operations and the numbers of a question, each in order."""
    words = question.removeprefix(QUESTION.split("{}")[0]).split(". ")[0].split()
    return " ".join(sorted(words[1::2]) + sorted(words[::2]))


class Sums(LevelTask):
    """The task. An answer is right if its last number is the truth."""

    data_source = "goldilocks/sums"
    levels = SUM_LEVELS
    key = staticmethod(sum_key)

    def grade(self, answer: str, truth: str, extra: Mapping[str, Any]) -> Score:
        number = last_number(answer)
        return graded(number is not None and number == float(truth))


def last_number(text: str) -> float | None:
    """Return the last number in a text; commas between digits and a typographic minus are understood."""
    found = _NUMBER.findall(text.replace("−", "-"))
    return float(found[-1].replace(",", "")) if found else None


# A call in the form of Hermes and Qwen models. The tiny model has one token for all that stands before the expression,
# and one for all behind it; verl's parser ``hermes`` sees the text.
CALL, CLOSE = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
TOOL = "<|tool|>"  # begins a message of the tool

NUMBERS, DIGITS = 8, 9  # of an expression, and of each of its numbers, at most
_EXPRESSION = re.compile(rf"-?[0-9]{{1,{DIGITS}}}(?:[-+*][0-9]{{1,{DIGITS}}}){{0,{NUMBERS - 1}}}")
_SUMMAND = re.compile(r"([-+]?)([0-9*]+)")


def calculate(expression: str) -> int:
    """Return the value of numbers with +, - and * between them; raise ``ValueError`` for any other text."""
    text = expression.replace(" ", "")
    accepted = f"at most {NUMBERS} numbers of at most {DIGITS} digits, with +, - or * between them"
    require(_EXPRESSION.fullmatch(text) is not None, "expression", expression, accepted)
    products = ((sign, math.prod(map(int, product.split("*")))) for sign, product in _SUMMAND.findall(text))
    return sum(-value if sign == "-" else value for sign, value in products)


def check_tool(seconds: float, fail_every: int) -> None:
    """Raise a ``ValueError`` for settings of the section ``calculator`` that the tool cannot have."""
    require(seconds >= 0, "calculator.seconds", seconds, "0 or more")
    require(fail_every >= 0, "calculator.fail_every", fail_every, "0 (no call fails) or more")


# Each level's share of a data set.
CALCULATOR_LEVELS: Mapping[ArithmeticLevel, float] = {
    ArithmeticLevel(operation, (digits, digits)): 1 for operation in "+-*" for digits in (1, 2, 3)
}


class Calculator(LevelTask):
    """The task. The last line of a conversation is its answer: calls and what the tool said stand above it."""

    data_source = "goldilocks/calculator"
    levels = CALCULATOR_LEVELS
    key = staticmethod(split_key)

    def grade(self, answer: str, truth: str, extra: Mapping[str, Any]) -> Score:
        return graded(answer.strip().rpartition("\n")[2].strip() == truth)
