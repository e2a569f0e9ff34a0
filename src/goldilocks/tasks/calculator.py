"""Arithmetic with a calculator: a tiny model that may call a tool, and does so for some problems only.

A right answer to most problems needs the tool. The tiny model knows the form of a call and copies what the tool says,
but seldom calls where numbers are long. RL has to teach when to call.

Invariant: what a model writes is parsed by a grammar of numbers and three operations, and never executed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from goldilocks.errors import require
from goldilocks.tasks.arithmetic import ArithmeticLevel, split_key
from goldilocks.tasks.registry import LevelTask, Score, graded

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
LEVELS: Mapping[ArithmeticLevel, float] = {
    ArithmeticLevel(operation, (digits, digits)): 1 for operation in "+-*" for digits in (1, 2, 3)
}


class Calculator(LevelTask):
    """The task. The last line of a conversation is its answer: calls and what the tool said stand above it."""

    data_source = "goldilocks/calculator"
    levels = LEVELS
    key = staticmethod(split_key)

    def grade(self, answer: str, truth: str, extra: Mapping[str, Any]) -> Score:
        """Return whether the last line of the conversation is the truth."""
        return graded(answer.strip().rpartition("\n")[2].strip() == truth)
