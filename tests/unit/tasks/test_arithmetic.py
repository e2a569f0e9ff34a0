"""Arithmetic: answers are right, splits never touch, and the same seed gives the same problems."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from goldilocks.tasks.arithmetic import LEVELS, Arithmetic, split_key
from goldilocks.tasks.registry import split_of

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
    val = {split_key(problem.question) for problem in TASK.problems("val", 50, val_seed)}
    assert not train & val


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from("+-*"))
def test_operands_swapped_belong_to_the_same_split(a, b, operation):
    assert split_of(split_key(f"{a}{operation}{b}=")) == split_of(split_key(f"{b}{operation}{a}="))


def test_the_same_seed_gives_the_same_problems_and_another_gives_others():
    assert TASK.problems("train", 100, 3) == TASK.problems("train", 100, 3)
    assert TASK.problems("train", 100, 3) != TASK.problems("train", 100, 4)


def test_problems_are_all_different_and_as_many_as_asked_for():
    questions = [problem.question for problem in TASK.problems("train", 3000, 0)]
    assert len(set(questions)) == len(questions) == 3000


def test_difficulty_runs_from_one_digit_to_beyond_the_model():
    levels = {problem.difficulty for problem in TASK.problems("train", 1000, 0)}
    assert min(levels) == 1
    assert max(levels) >= 6


def test_only_the_bare_number_is_right():
    assert TASK.grade(" 12\n", "12", {}) == {"score": 1.0, "acc": 1.0}
    for wrong in ("", "13", "12.", "012", "6+6", "12 12", "__import__('os').abort()"):
        assert TASK.grade(wrong, "12", {}) == {"score": 0.0, "acc": 0.0}
