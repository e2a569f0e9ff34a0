"""Work on a row of digits, by skill and by length: a ladder of levels, of which a model can do the lowest at first.

A level is a length, from three digits (level 1) to twelve (level 10), and every level has thousands of problems. A
skill at one level builds on the same skill one level below.

Invariant: problems with the same digits are of the same split, whatever their skill.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from goldilocks.tasks.registry import LevelTask, Problem, split_of

SKILLS: Mapping[str, Callable[[str], str]] = {
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
    "rotate": lambda digits: digits[1:] + digits[0],  # the first digit goes to the end
    "swap": lambda digits: "".join(digits[i : i + 2][::-1] for i in range(0, len(digits), 2)),  # neighbours
    "next": lambda digits: "".join(str((int(digit) + 1) % 10) for digit in digits),  # each digit, one further
}
SHORTEST, TOP = 3, 10  # digits of level 1, and the highest level
CHARACTERS = "".join(sorted({*"0123456789 \n", *"".join(SKILLS)}))  # of a question and its answer

# The lessons of a warm start. A lesson of level k has the right answer with probability RIGHT · fall^(k − 1), else the
# digits as they were. A model that has learnt its lessons is right this often.
RIGHT, FALL = 0.5, 0.25


@dataclass(frozen=True)
class LadderLevel:
    """Problems of one skill on rows of one length."""

    skill: str
    level: int

    def draw(self, rng: random.Random) -> Problem:
        """Draw one problem, of either split. No row stays as it is, so that doing nothing is never right."""
        length = SHORTEST + self.level - 1
        while True:
            digits = "".join(rng.choice("0123456789") for _ in range(length))
            answer = SKILLS[self.skill](digits)
            if answer != digits:
                extra = {"skill": self.skill, "level": self.level}
                return Problem(f"{self.skill} {digits}", answer, float(self.level), extra)


LEVELS: Mapping[LadderLevel, float] = {LadderLevel(skill, level): 1 for level in range(1, TOP + 1) for skill in SKILLS}


def split_key(question: str) -> str:
    """Return the digits: a row that is held out is held out for every skill."""
    return question.split()[1]


def lessons(rng: random.Random, fall: float = FALL) -> Iterator[Problem]:
    """Yield lessons without end: fewer of the higher levels, and of those more that leave the digits as they were."""
    shares = [level.level**-2 for level in LEVELS]
    while True:
        level = rng.choices(list(LEVELS), shares)[0]
        problem = level.draw(rng)
        if split_of(split_key(problem.question)) == "val":
            continue
        if rng.random() < RIGHT * fall ** (level.level - 1):
            yield problem
        else:
            yield Problem(problem.question, split_key(problem.question), problem.difficulty)


class Ladder(LevelTask):
    """The task; every level of every skill has the same share."""

    data_source = "goldilocks/ladder"
    levels = LEVELS
    key = staticmethod(split_key)
    lessons = staticmethod(lessons)
