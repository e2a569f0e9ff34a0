"""GSM8K: grade-school word problems, from files at hand or from the hub; answers compared by ``math-verify``.

Invariant: the published test set is the validation set. A single file without that division is divided by content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from goldilocks.errors import require
from goldilocks.runs.records import read_records
from goldilocks.tasks.registry import Problem, Score, Split, graded, split_of

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_PUBLISHED: dict[Split, str] = {"train": "train", "val": "test"}
_FINAL = re.compile(r"####\s*(.+)")
_ENDINGS = (".parquet", ".jsonl")
_ANSWER_CHARACTERS = 100  # a final answer is a number: what is longer is not parsed


class Gsm8k:
    """``source``: a .parquet or .jsonl file with ``question`` and ``answer``, a folder of two splits, or None (hub)."""

    data_source = "openai/gsm8k"

    def __init__(self, source: str | None = None) -> None:
        self.source = source

    def problems(self, split: Split, size: int, seed: int) -> list[Problem]:
        """Return the first ``size`` problems; nothing is drawn, so the seed has no effect."""
        import math_verify  # noqa: F401  # what grades the answers is missed here, before a run

        problems = []
        for row in self._rows(split)[:size]:
            question, solution = row["question"], row["answer"]
            truth = final_answer(solution)
            require(truth is not None, "answer", solution[-40:], "a solution with '#### number' at its end")
            steps = float(solution.count("<<"))  # a step of a published solution has one calculator annotation <<…>>
            problems.append(Problem(f"{question} {INSTRUCTION}", str(truth).replace(",", ""), steps))
        return problems

    def grade(self, answer: str, truth: str, extra: Mapping[str, Any]) -> Score:
        """Return whether the final number of an answer equals the truth, in any notation."""
        from math_verify import parse, verify

        text = final_answer(answer)
        # No answer here has a power, and a tower of powers would keep sympy busy for ever. The library's own timeouts
        # are off because they use signals, which work only in the main thread.
        if text is None or "^" in text or "**" in text:
            return graded(False)
        gold, given = (parse(side, parsing_timeout=None) for side in (truth, text))
        return graded(bool(verify(gold, given, timeout_seconds=None)))

    def _rows(self, split: Split) -> list[dict[str, str]]:
        """Return the questions and answers of a split as they are published."""
        if self.source is None:
            from datasets import load_dataset

            return load_dataset(self.data_source, "main", split=_PUBLISHED[split]).to_list()
        path = Path(self.source)
        require(path.exists(), "source", self.source, "a parquet or JSON lines file that exists, or a folder")
        if path.is_file():
            return [row for row in _read(path) if split_of(row["question"]) == split]
        name = f"*{_PUBLISHED[split]}*"
        files = [file for file in sorted(path.rglob(name)) if file.suffix in _ENDINGS]
        accepted = f"a folder with a file named {name} that ends in {' or '.join(_ENDINGS)}"
        require(bool(files), "source", self.source, accepted)
        return [row for file in files for row in _read(file)]


def final_answer(solution: str) -> str | None:
    """Return what follows the last ``####``, else the last ``\\boxed{}``, else None; None too if it is too long."""
    if marked := _FINAL.findall(solution):
        text = marked[-1].strip()
    elif (start := solution.rfind("\\boxed{")) >= 0:
        text = solution[start:].splitlines()[0]
    else:
        return None
    return text if len(text) <= _ANSWER_CHARACTERS else None


def _read(path: Path) -> list[dict[str, str]]:
    """Return the questions and answers in a file."""
    rows = read_records(path)
    whole = {"question", "answer"} <= set(rows[0])
    require(whole, "source", str(path), f"the columns question and answer; there are {', '.join(rows[0])}")
    return [{"question": str(row["question"]), "answer": str(row["answer"])} for row in rows]
