"""GSM8K and MATH as they are published, from files at hand; answers compared as text, else by ``math-verify``.

Invariants: the published test set is the validation set, and none of its problems is trained on. Which half of GSM8K a
warm start teaches depends on the question alone; RL never trains that half.

``math-verify`` is imported with this module, so that the time limit of a reward function does not count it. Its own
time limits are off: they are signals, which wait for a computation of one call into C, such as 9999999!, to return.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from goldilocks.errors import require
from goldilocks.hashing import content_key
from goldilocks.runs.records import read_records
from goldilocks.tasks.registry import Problem, Score, Split, compute_score, graded, random_score, split_of

logger = logging.getLogger(__name__)

__all__ = ["Gsm8k", "Math", "compute_score", "random_score"]

PUBLISHED: dict[Split, str] = {"train": "train", "val": "test"}
ENDINGS = (".parquet", ".jsonl", ".json")
LONGEST = 200  # characters of a final answer: what is longer is wrong
_FINAL = re.compile(r"####\s*(.+)")
_BOX = "\\boxed{"
_CALCULATOR = re.compile(r"<<.*?>>")  # annotations of a published solution, one for each step
# What does not change the value of an answer: spaces, sizes of brackets, units of money, angle and share, a last dot.
_DECORATION = re.compile(r"\\left|\\right|\\[!,;: $%]|\^\\circ|\^\{\\circ\}|[\s$%]|\.$")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{(.*?)\}")


class Published:
    """``source``: a file, or a folder with a file for each published split; ``key`` is what messages call it."""

    data_source: str
    columns: tuple[str, ...]  # that a file must have

    def __init__(self, source: str | None = None, key: str = "--source") -> None:
        self.source, self.key = source, key

    def files(self, split: Split) -> list[Path]:
        """Return the files of a split: the one file that is the source, or those of the folder by their names."""
        name = f"*{PUBLISHED[split]}*"
        accepted = f"a file, or a folder with a file named {name}, that ends in {', '.join(ENDINGS)}"
        path = Path(self.source or "").expanduser()
        there = self.source is not None and path.exists()
        found = [path] if there and path.is_file() else sorted(path.rglob(name)) if there else []
        found = [file for file in found if file.suffix in ENDINGS]
        require(bool(found), self.key, self.source, accepted)
        return found

    def rows(self, split: Split) -> list[dict[str, Any]]:
        """Return the rows of a split as they are published; a single file is divided by content."""
        rows: list[dict[str, Any]] = []
        for file in self.files(split):
            found = json.loads(file.read_text()) if file.suffix == ".json" else read_records(file)
            whole = bool(found) and set(self.columns) <= set(found[0])
            there = ", ".join(found[0]) if found else "no rows"
            require(whole, self.key, str(file), f"the columns {' and '.join(self.columns)}; there are {there}")
            rows += found
        single = Path(self.source or "").expanduser().is_file()
        return [row for row in rows if split_of(row[self.columns[0]]) == split] if single else rows


class Gsm8k(Published):
    """Grade-school word problems. With ``lessons`` half of the training problems are left to a warm start."""

    data_source = "openai/gsm8k"
    columns = ("question", "answer")
    instruction = 'Let\'s think step by step and output the final answer after "####".'

    def __init__(self, source: str | None = None, key: str = "--source", lessons: bool = False) -> None:
        super().__init__(source, key)
        self._half = lessons

    def rows(self, split: Split) -> list[dict[str, Any]]:
        if self.source is not None:
            return super().rows(split)
        from datasets import load_dataset

        return load_dataset(self.data_source, "main", split=PUBLISHED[split]).to_list()

    def problems(self, split: Split, size: int | None, seed: int) -> list[Problem]:
        """Return the first ``size`` problems, or all; nothing is drawn, so the seed has no effect."""
        rows = [row for row in self.rows(split) if not (split == "train" and self._half and _is_lesson(row))]
        return [self._problem(row) for row in rows[:size]]

    def lessons(self, rng: random.Random) -> Iterator[Problem]:
        """Yield the lessons' half again and again, each time in another order: published solutions as answers."""
        half = [row for row in self.rows("train") if _is_lesson(row)]
        require(bool(half), self.key, self.source, "a training split with problems for a warm start")
        while True:
            for row in rng.sample(half, len(half)):
                problem = self._problem(row)
                yield Problem(problem.question, _CALCULATOR.sub("", row["answer"]), problem.difficulty)

    def _problem(self, row: Mapping[str, str]) -> Problem:
        truth = marked_answer(row["answer"])
        require(truth is not None, "answer", row["answer"][-40:], "a solution with '#### number' at its end")
        steps = float(len(_CALCULATOR.findall(row["answer"])))
        return Problem(f"{row['question']} {self.instruction}", str(truth).replace(",", ""), steps)

    def grade(self, answer: str, truth: str, extra: Mapping[str, Any]) -> Score:
        """Return whether the final number of an answer, marked or boxed, equals the truth in any notation."""
        given = marked_answer(answer) or boxed_answer(answer) or ""
        computed = "^" in given or "**" in given  # no number, and 9^9^9^9 would take for ever
        return graded(bool(given) and not computed and same(given, truth))


class Math(Published):
    """Competition problems (Hendrycks et al. 2021) with ``level`` 1 to 5 and ``type``, one of seven subjects."""

    data_source = "DigitalLearningGmbH/MATH-lighteval"  # as verl's own preparation calls it
    columns = ("problem",)
    instruction = "Please reason step by step, and put your final answer within \\boxed{}."

    def problems(self, split: Split, size: int | None, seed: int) -> list[Problem]:
        """Return the first ``size`` problems, or all.

        Training problems that are also test problems, and problems without an answer, are left out with a warning.
        """
        held_out = {row["problem"] for row in self.rows("val")} if split == "train" else set()
        rows = self.rows(split)
        apart = [row for row in rows if row["problem"] not in held_out]
        found = [problem for problem in map(self._problem, apart) if problem.answer]
        if len(found) < len(rows):
            said = "%s: %d %s problems have no answer, and %d are test problems: left out"
            logger.warning(said, self.source, len(apart) - len(found), split, len(rows) - len(apart))
        return found[:size]

    def _problem(self, row: Mapping[str, Any]) -> Problem:
        answer = row.get("answer")
        truth = str(answer) if answer not in (None, "") else boxed_answer(str(row.get("solution", ""))) or ""
        level = re.sub(r"\D", "", f"{row.get('level', row.get('difficulty', ''))}".removesuffix(".0")) or "0"
        subject = row.get("type") or row.get("subject") or f"{row.get('unique_id', '')}/".split("/")[1]
        kind = str(subject).lower().replace("&", "and").replace(" ", "_")
        return Problem(f"{row['problem']} {self.instruction}", truth, float(level), {"level": level, "type": kind})

    def grade(self, answer: str, truth: str, extra: Mapping[str, Any]) -> Score:
        """Return whether what the last box of an answer holds equals the truth."""
        given = boxed_answer(answer)
        return graded(given is not None and same(given, truth, around="$"))


def _is_lesson(row: Mapping[str, str]) -> bool:
    return content_key(row["question"]) % 2 == 0


def marked_answer(solution: str) -> str | None:
    """Return what follows the last ``####``, or None."""
    marked = _FINAL.findall(solution)
    return marked[-1].strip() if marked else None


def boxed_answer(solution: str) -> str | None:
    """Return what the last box holds, braces inside it matched; None where there is none, or it is not closed."""
    start = solution.rfind(_BOX)
    depth = 1
    for place in range(start + len(_BOX), len(solution) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(solution[place], 0)
        if depth == 0:
            return solution[start + len(_BOX) : place]
    return None


def same(given: str, truth: str, around: str = "") -> bool:
    """Return whether two answers are the same text but for decoration, or have the same value; "$" is around LaTeX."""
    if len(given) > LONGEST:
        return False
    if plain(given) == plain(truth):
        return True
    sides = [parse(f"{around}{side}{around}", parsing_timeout=None) for side in (truth, given)]
    return bool(verify(*sides, timeout_seconds=None))


def plain(answer: str) -> str:
    """Return an answer without what does not change its value, and fractions written one way."""
    answer = _TEXT.sub(r"\1", answer).replace("dfrac", "frac").replace("tfrac", "frac")
    return _DECORATION.sub("", answer.strip())
