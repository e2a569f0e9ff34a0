"""Sums in words: known answers, levels with a difficulty, graded by the last number."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.tasks.sums import LEVELS, SumLevel, Sums, last_number, split_key


@given(seed=st.integers(0, 2**32), level=st.sampled_from(list(LEVELS)))
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
    assert not {split_key(p.question) for p in train} & {split_key(p.question) for p in val}
    assert split_key("Calculate 3 + 5. Give the final answer as a number.") == split_key(
        "Calculate 5 + 3. Give the final answer as a number."
    )


def test_every_level_is_in_a_data_set_and_its_name_is_in_the_row():
    found = Counter(problem.extra["level"] for problem in Sums().problems("train", 500, seed=0))
    assert len(found) == len(LEVELS)


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
