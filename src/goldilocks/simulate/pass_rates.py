"""The pass rate and the mean answer length of each prompt, read from saved data.

The columns say how to read the rows: ``pass_rate`` per prompt, a list of ``rewards`` per prompt, or ``score`` per
rollout (as in verl's dumps), where the rows of one prompt are put together. A reward of 0.5 or more is a pass, as for
the collector's beliefs.

The built-in data set: 2,000 prompts, as mixed in difficulty as reasoning data are for a model at its start.

It does not depend on the seed of a simulation, so two seeds differ by sampling alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from goldilocks.hashing import content_key
from goldilocks.runs.records import Record, columns_of, read_records

POSITIVE_THRESHOLD = 0.5
DEFAULT_TOKENS = 512
CHARACTERS_PER_TOKEN = 4  # of English text, roughly; only where no column counts tokens

PROMPT_COLUMNS = ("prompt", "input", "uid")
SCORE_COLUMNS = ("score", "reward")
LENGTH_COLUMNS = ("tokens", "mean_tokens", "response_length", "length")
TEXT_COLUMNS = ("output", "response")


@dataclass(frozen=True)
class PassRates:
    """For each prompt its content, the chance that an answer is right, and the mean tokens per answer.

    ``readable``: the contents are the texts of the prompts, not only names for them.
    """

    contents: tuple[object, ...]
    pass_rate: np.ndarray
    tokens: np.ndarray
    readable: bool = True
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)  # what else the file says of each prompt

    def __len__(self) -> int:
        return len(self.contents)


def read_pass_rates(path: Path | str) -> PassRates:
    """The prompts of a JSONL, CSV or parquet file, or of a directory of verl's dumps."""
    rows = read_records(path)
    try:
        return interpret(rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def interpret(rows: Sequence[Record]) -> PassRates:
    """Prompts from rows, by the columns of the first."""
    columns = rows[0].keys()
    if "pass_rate" in columns:
        return _one_row_a_prompt(rows, _pass_rate)
    if "rewards" in columns:
        return _one_row_a_prompt(rows, _share_of_passes)
    score, prompt = _first(SCORE_COLUMNS, columns), _prompt_column(columns)
    if score and prompt:
        return _one_row_a_rollout(rows, score, prompt)
    raise ValueError(
        "no columns that say a pass rate; accepted: pass_rate or rewards (a list), one row per prompt; or score with "
        f"prompt or input, one row per rollout; there are: {', '.join(columns)}"
    )


def _one_row_a_prompt(rows: Sequence[Record], rate: Callable[[Record], float]) -> PassRates:
    prompt = _prompt_column(rows[0].keys())
    contents = [number if prompt is None else row.get(prompt) for number, row in enumerate(rows)]
    return _pass_rates(contents, _each(rate, rows), _each(_length, rows), rows)


def _one_row_a_rollout(rows: Sequence[Record], score: str, prompt: str) -> PassRates:
    passes = _each(lambda row: _number(row, score) >= POSITIVE_THRESHOLD, rows)
    lengths = _each(_length, rows)
    contents = _each(lambda row: _present(row, prompt), rows)
    rollouts: dict[int, list[int]] = {}
    for number, content in enumerate(contents):
        rollouts.setdefault(content_key(content), []).append(number)

    def means(values: Sequence[float]) -> list[float]:
        return [math.fsum(values[number] for number in numbers) / len(numbers) for numbers in rollouts.values()]

    firsts = [numbers[0] for numbers in rollouts.values()]
    prompts = [contents[number] for number in firsts]
    return _pass_rates(prompts, means(passes), means(lengths), [rows[number] for number in firsts])


def _pass_rates(
    contents: Iterable[object], rates: Sequence[float], lengths: Sequence[float], rows: Sequence[Record]
) -> PassRates:
    """``rows``: the row that first speaks of each prompt, for its other columns and those of its ``extra_info``."""
    known = columns_of(rows)
    return PassRates(tuple(contents), np.array(rates, float), np.array(lengths, float), columns=known)


def _each(read: Callable[[Record], Any], rows: Sequence[Record]) -> list[Any]:
    """``read`` of every row; an error says in which row, counted from 1."""
    values = []
    for number, row in enumerate(rows, start=1):
        try:
            values.append(read(row))
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from None
    return values


def _pass_rate(row: Record) -> float:
    rate = _number(row, "pass_rate")
    if not 0 <= rate <= 1:
        raise ValueError(f"pass_rate={rate!r} is not accepted: between 0 and 1")
    return rate


def _share_of_passes(row: Record) -> float:
    rewards = _present(row, "rewards")
    if isinstance(rewards, str):  # CSV has no lists: a list is written as JSON there
        try:
            rewards = json.loads(rewards)
        except ValueError:
            raise ValueError(f"rewards={rewards!r} is not accepted: a list of numbers such as [0, 1, 1]") from None
    if not isinstance(rewards, list) or not rewards:
        raise ValueError(f"rewards={rewards!r} is not accepted: a list of at least one number")
    passes = [_number({"rewards": reward}, "rewards") >= POSITIVE_THRESHOLD for reward in rewards]
    return sum(passes) / len(passes)


def _length(row: Record) -> float:
    """Return the mean tokens per answer: from a column, estimated from a text, or the default."""
    column = _first(LENGTH_COLUMNS, row)
    if column:
        tokens = _number(row, column)
        if tokens < 0:
            raise ValueError(f"{column}={tokens!r} is not accepted: a number of tokens, 0 or more")
        return max(tokens, 1.0)
    text = _first(TEXT_COLUMNS, row)
    return max(len(str(row[text])) / CHARACTERS_PER_TOKEN, 1.0) if text else float(DEFAULT_TOKENS)


def _number(row: Mapping[str, object], column: str) -> float:
    value = _present(row, column)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{column}={value!r} is not accepted: a finite number")
    return float(value)


def _present(row: Mapping[str, object], column: str) -> object:
    if row.get(column) is None:
        raise ValueError(f"no value in column {column!r}; there are: {', '.join(row)}")
    return row[column]


def _prompt_column(columns: Iterable[str]) -> str | None:
    return _first(PROMPT_COLUMNS, columns)


def _first(names: Sequence[str], columns: Iterable[str]) -> str | None:
    there = set(columns)
    return next((name for name in names if name in there), None)


LONGEST, SHORTEST = 1400, 200  # mean tokens of an answer that is never right, and of one that always is


@dataclass(frozen=True)
class Difficulty:
    """``prompts`` prompts with pass rates spread evenly from ``lowest`` to ``highest``."""

    name: str
    prompts: int
    lowest: float
    highest: float


DIFFICULTIES = (
    Difficulty("impossible", 400, 0.0, 0.0),
    Difficulty("hard", 500, 0.01, 0.2),
    Difficulty("medium", 500, 0.2, 0.8),
    Difficulty("easy", 300, 0.8, 0.99),
    Difficulty("trivial", 300, 1.0, 1.0),
)


def mixture() -> PassRates:
    """The built-in data set. Harder prompts have longer answers: a geometric path from SHORTEST to LONGEST."""
    rates = np.concatenate([np.linspace(one.lowest, one.highest, one.prompts) for one in DIFFICULTIES])
    names = tuple(f"{one.name} {number}" for one in DIFFICULTIES for number in range(one.prompts))
    # The names tell the difficulty: a forecast must not read them.
    return PassRates(names, rates, LONGEST * (SHORTEST / LONGEST) ** rates, readable=False)
