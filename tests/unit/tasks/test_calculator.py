"""The calculator: a grammar instead of an interpreter, and answers below what the tool said."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.tasks.calculator import CALL, CLOSE, Calculator, calculate
from goldilocks.tasks.tiny_model import calling_tokenizer
from goldilocks.tasks.warm_start import encode

TOKENIZER = calling_tokenizer()


@given(st.lists(st.integers(0, 999_999_999), min_size=1, max_size=8), st.data())
def test_it_calculates_as_python_does(numbers, data):
    text = str(numbers[0])
    for number in numbers[1:]:
        text += data.draw(st.sampled_from("+-*")) + str(number)
    assert calculate(text) == eval(text)
    assert calculate("-" + text) == eval("-" + text)


@pytest.mark.parametrize(
    "text",
    ["", "1+", "2**9", "__import__('os')", "1e9", "(1)", "1/2", "\u0663+1", "1234567890", "1+1+1+1+1+1+1+1+1", "1\n;"],
)
def test_everything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"expression=.* is not accepted: at most 8 numbers of at most 9 digits"):
        calculate(text)


@given(st.text())
def test_no_text_is_more_than_a_number_or_an_error(text):
    with contextlib.suppress(ValueError):
        assert isinstance(calculate(text), int)


def test_a_call_is_its_characters_and_three_tokens_and_fits_the_recipe():
    for problem in Calculator().problems("train", 512, seed=0):
        prompt, call = encode(TOKENIZER, problem.question, f"{CALL}{problem.question[:-1]}{CLOSE}")
        assert len(call) == len(problem.question) - 1 + 3
        assert len(prompt) <= 16
        assert len(call) + len(f"\n<{problem.answer}\n>") + len(problem.answer) + 1 < 40


def test_the_last_line_is_the_answer():
    grade = Calculator().grade
    assert grade(f"{CALL}2+2{CLOSE}\n4\n4", "4", {}) == {"score": 1.0, "acc": 1.0}
    assert grade("4", "4", {})["acc"] == 1.0
    assert grade(f"{CALL}2+2{CLOSE}\n4\n5", "4", {})["acc"] == 0.0
    assert grade("", "4", {})["acc"] == 0.0
