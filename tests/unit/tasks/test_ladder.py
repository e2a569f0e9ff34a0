"""The ladder: known answers, thousands of problems at every level, and lessons that teach the lowest levels only."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.tasks.ladder import (
    CHARACTERS,
    FALL,
    LEVELS,
    RIGHT,
    SKILLS,
    TOP,
    Ladder,
    LadderLevel,
    lessons,
    split_key,
)
from goldilocks.tasks.registry import split_of


@pytest.mark.parametrize(
    ("skill", "digits", "answer"),
    [
        ("reverse", "4821", "1284"),
        ("sort", "48214", "12448"),
        ("rotate", "4821", "8214"),
        ("swap", "48213", "84123"),
        ("next", "4890", "5901"),
    ],
)
def test_what_each_skill_does(skill, digits, answer):
    assert SKILLS[skill](digits) == answer


@given(seed=st.integers(0, 2**32), level=st.sampled_from(list(LEVELS)))
def test_a_problem_has_its_level_in_the_row_and_doing_nothing_is_wrong(seed, level):
    problem = level.draw(random.Random(seed))
    skill, digits = problem.question.split()
    assert problem.answer == SKILLS[skill](digits) != digits
    assert problem.extra == {"skill": level.skill, "level": level.level}
    assert len(digits) == level.level + 2
    assert set(problem.question + problem.answer) <= set(CHARACTERS)


def test_every_level_has_thousands_of_problems():
    assert len({LadderLevel("sort", 1).draw(random.Random(seed)).question for seed in range(4000)}) * len(SKILLS) > 3000
    found = Counter(problem.extra["level"] for problem in Ladder().problems("train", 2000, seed=0))
    assert len(found) == TOP
    assert min(found.values()) > 150


def test_digits_that_are_held_out_are_held_out_for_every_skill():
    train, val = (Ladder().problems(split, 500, seed=0) for split in ("train", "val"))
    assert (len(train), len(val)) == (500, 500)
    assert not {split_key(p.question) for p in train} & {split_key(p.question) for p in val}


def test_lessons_are_right_as_often_as_a_level_says_and_never_held_out():
    taught = list(islice(lessons(random.Random(0)), 6000))
    assert {split_of(split_key(lesson.question)) for lesson in taught} == {"train"}
    for level in (1, 2, TOP):
        own = [lesson for lesson in taught if lesson.difficulty == level]
        right = sum(lesson.answer != split_key(lesson.question) for lesson in own) / len(own)
        assert right == pytest.approx(RIGHT * FALL ** (level - 1), abs=0.03)


def test_grading():
    assert Ladder().grade(" 1284\n", "1284", {}) == {"score": 1.0, "acc": 1.0}
    assert Ladder().grade("1284 or 4821", "1284", {}) == {"score": 0.0, "acc": 0.0}
