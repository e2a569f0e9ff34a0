"""Arithmetic: answers are right, splits never touch, and the same seed gives the same problems."""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from goldilocks.tasks.arithmetic import (
    CALL,
    CLOSE,
    LEVELS,
    SUM_LEVELS,
    Arithmetic,
    Calculator,
    SumLevel,
    Sums,
    calculate,
    last_number,
    split_key,
    sum_key,
)
from goldilocks.tasks.registry import split_of
from goldilocks.tasks.tiny_model import tiny_model
from goldilocks.tasks.warm_start import encode

TASK = Arithmetic()


def parts(question: str) -> tuple[int, str, int]:
    operation = next(sign for sign in "+-*" if sign in question)
    a, b = question.rstrip("=").split(operation)
    return int(a), operation, int(b)


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.sampled_from(list(LEVELS)))
def test_every_answer_is_the_result(seed, level):
    problem = level.draw(random.Random(seed))
    a, operation, b = parts(problem.question)
    assert int(problem.answer) == {"+": a + b, "-": a - b, "*": a * b}[operation]
    assert (len(str(a)), len(str(b))) == level.digits


@settings(max_examples=10)
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_splits_are_disjoint_for_any_two_seeds(train_seed, val_seed):
    train = {split_key(problem.question) for problem in TASK.problems("train", 200, train_seed)}
    assert not train & {split_key(problem.question) for problem in TASK.problems("val", 50, val_seed)}


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from("+-*"))
def test_operands_swapped_belong_to_the_same_split(a, b, operation):
    assert split_of(split_key(f"{a}{operation}{b}=")) == split_of(split_key(f"{b}{operation}{a}="))


def test_problems_are_those_of_their_seed_all_different_and_from_one_digit_to_beyond_the_model():
    assert TASK.problems("train", 100, 3) == TASK.problems("train", 100, 3)
    assert TASK.problems("train", 100, 3) != TASK.problems("train", 100, 4)
    problems = TASK.problems("train", 3000, 0)
    assert len({problem.question for problem in problems}) == len(problems) == 3000
    assert min(problem.difficulty for problem in problems[:1000]) == 1
    assert max(problem.difficulty for problem in problems[:1000]) >= 6


def test_only_the_bare_number_is_right():
    assert TASK.grade(" 12\n", "12", {}) == {"score": 1.0, "acc": 1.0}
    for wrong in ("", "13", "12.", "012", "6+6", "12 12", "__import__('os').abort()"):
        assert TASK.grade(wrong, "12", {}) == {"score": 0.0, "acc": 0.0}


@given(seed=st.integers(0, 2**32), level=st.sampled_from(list(SUM_LEVELS)))
def test_the_answer_is_that_of_the_question(seed, level):
    problem = level.draw(random.Random(seed))
    words = problem.question.removeprefix("Calculate ").split(". ")[0].split()
    value = int(words[0])
    for operation, number in zip(words[1::2], words[2::2], strict=True):
        value = {"+": value.__add__, "-": value.__sub__, "*": value.__mul__}[operation](int(number))
    assert problem.answer == str(value)
    assert problem.difficulty == level.difficulty


def test_splits_share_no_problem_and_no_twin():
    train, val = (Sums().problems(split, 400, seed=0) for split in ("train", "val"))
    assert (len(train), len(val)) == (400, 400)
    assert not {sum_key(p.question) for p in train} & {sum_key(p.question) for p in val}
    assert sum_key("Calculate 3 + 5. Give the final answer as a number.") == sum_key(
        "Calculate 5 + 3. Give the final answer as a number."
    )


def test_every_level_is_in_a_data_set_and_its_name_is_in_the_row():
    assert len(Counter(problem.extra["level"] for problem in Sums().problems("train", 500, seed=0))) == len(SUM_LEVELS)


def test_a_level_is_as_hard_as_the_digits_it_works_through():
    assert SumLevel(2, 1, "+").difficulty < SumLevel(3, 1, "+-").difficulty < SumLevel(3, 2, "+-").difficulty
    assert SumLevel(2, 2, "+").difficulty < SumLevel(2, 2, "*").difficulty


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("The answer is 12.", 12),
        ("3 + 4 = 7", 7),
        ("It is 1,234.", 1234),
        ("10 − 12 is −2", -2),
        ("7.0", 7),
        ("5-3", 3),
        ("7.5", 7.5),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_last_number_counts(answer, number):
    assert last_number(answer) == number


def test_grading():
    assert Sums().grade("3 + 4 = 7", "7", {}) == {"score": 1.0, "acc": 1.0}
    assert Sums().grade("7 or maybe 8", "7", {}) == {"score": 0.0, "acc": 0.0}


TOKENIZER = AutoTokenizer.from_pretrained(tiny_model("calculator"))


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
