"""The pass rate and the mean answer length of each prompt, read from saved data or built in.

The columns of a file say how it is read: ``pass_rate`` per prompt, a list of ``rewards`` per prompt, or ``score`` per
rollout (as in verl's dumps), where the rows with the same prompt are counted together.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from goldilocks.core.source import ListSource
from goldilocks.errors import require
from goldilocks.hashing import content_key
from goldilocks.runs import records
from goldilocks.runs.records import Record
from goldilocks.types import POSITIVE_THRESHOLD

DEFAULT_TOKENS = 512
CHARACTERS_PER_TOKEN = 4  # of English text, roughly; used where no column counts tokens
STATED = 1000.0  # answers that a pass rate counts as over where nothing says how many

PROMPT_TEXTS = ("prompt", "input")
PROMPT_COLUMNS = (*PROMPT_TEXTS, "uid")
SCORE_COLUMNS = ("score", "reward")
LENGTH_COLUMNS = ("tokens", "mean_tokens", "response_length", "length")


@dataclass(frozen=True)
class PassRates:
    """For each prompt its content, the chance that an answer is right, and the mean tokens per answer.

    ``readable``: the contents are the texts of the prompts, not only names for them. ``trials``: how many answers the
    pass rates are over.
    """

    contents: tuple[object, ...]
    pass_rate: np.ndarray
    tokens: np.ndarray
    readable: bool = True
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)  # what else the file says of each prompt
    trials: np.ndarray | float = STATED

    def __len__(self) -> int:
        return len(self.contents)

    def source(self) -> ListSource:
        """Return the prompts as a collector takes them."""
        return ListSource(self.contents, readable=self.readable, columns=self.columns)


def read_pass_rates(path: Path | str) -> PassRates:
    """Read the prompts of a JSONL, CSV or parquet file, or of a directory of verl's dumps."""
    rows = records.read_records(path)
    try:
        return interpret(rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def interpret(rows: Sequence[Record]) -> PassRates:
    """Return the prompts of rows; the columns of the first row say how to read them."""
    columns = rows[0].keys()
    if "pass_rate" in columns:
        return _one_row_a_prompt(rows, _stated)
    if "rewards" in columns:
        return _one_row_a_prompt(rows, _share_of_passes)
    score, prompt = records.first_column(SCORE_COLUMNS, columns), records.first_column(PROMPT_COLUMNS, columns)
    if score and prompt:
        return _one_row_a_rollout(rows, score, prompt)
    raise ValueError(
        "no columns that say a pass rate; accepted: pass_rate or rewards (a list), one row per prompt; or score with "
        f"prompt or input, one row per rollout; there are: {', '.join(columns)}"
    )


def _one_row_a_prompt(rows: Sequence[Record], read: Callable[[Record], tuple[float, float]]) -> PassRates:
    """``read`` returns the pass rate of a row and how many answers it is over."""
    prompt = records.first_column(PROMPT_COLUMNS, rows[0])
    rates, trials = np.array(records.each_row(read, rows)).T
    return PassRates(
        tuple(place if prompt is None else row.get(prompt) for place, row in enumerate(rows)),
        rates,
        np.array(records.each_row(_length, rows)),
        readable=prompt in PROMPT_TEXTS,
        columns=records.columns_of(rows),
        trials=trials,
    )


def _one_row_a_rollout(rows: Sequence[Record], score: str, prompt: str) -> PassRates:
    passes = records.each_row(lambda row: records.number(row, score) >= POSITIVE_THRESHOLD, rows)
    lengths = records.each_row(_length, rows)
    contents = records.each_row(lambda row: records.present(row, prompt), rows)
    rollouts: dict[int, list[int]] = {}
    for place, content in enumerate(contents):
        rollouts.setdefault(content_key(content), []).append(place)

    def means(values: Sequence[float]) -> np.ndarray:
        return np.array([math.fsum(values[place] for place in places) / len(places) for places in rollouts.values()])

    firsts = [places[0] for places in rollouts.values()]
    return PassRates(
        tuple(contents[place] for place in firsts),
        means(passes),
        means(lengths),
        readable=prompt in PROMPT_TEXTS,
        columns=records.columns_of([rows[place] for place in firsts]),  # what the first row says of a prompt
        trials=np.array([len(places) for places in rollouts.values()], dtype=float),
    )


def _stated(row: Record) -> tuple[float, float]:
    rate = records.number(row, "pass_rate")
    require(0 <= rate <= 1, "pass_rate", rate, "between 0 and 1")
    return rate, STATED


def _share_of_passes(row: Record) -> tuple[float, float]:
    rewards = records.present(row, "rewards")
    if isinstance(rewards, str):  # CSV has no lists: a list is written as JSON there
        with contextlib.suppress(ValueError):
            rewards = json.loads(rewards)
    several = isinstance(rewards, list) and len(rewards) > 0
    require(several, "rewards", rewards, "a list of at least one number, such as [0, 1, 1]")
    assert isinstance(rewards, list)
    passes = [records.number({"rewards": reward}, "rewards") >= POSITIVE_THRESHOLD for reward in rewards]
    return sum(passes) / len(passes), len(passes)


def _length(row: Record) -> float:
    """Return the tokens of an answer, or their mean: from a column, estimated from the text, or the default."""
    column = records.first_column(LENGTH_COLUMNS, row)
    if column:
        tokens = records.number(row, column)
        require(tokens >= 0, column, tokens, "a number of tokens, 0 or more")
        return max(tokens, 1.0)
    text = records.first_column(records.TEXT_COLUMNS, row)
    return max(len(str(row[text])) / CHARACTERS_PER_TOKEN, 1.0) if text else float(DEFAULT_TOKENS)


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
    """Return the built-in data set: 2,000 prompts, as mixed in difficulty as reasoning data are for a fresh model.

    Harder prompts have longer answers: a geometric path from SHORTEST to LONGEST. The data set does not depend on the
    seed of a simulation, so two seeds differ by sampling alone.
    """
    rates = np.concatenate([np.linspace(one.lowest, one.highest, one.prompts) for one in DIFFICULTIES])
    names = tuple(f"{one.name} {number}" for one in DIFFICULTIES for number in range(one.prompts))
    # The names tell the difficulty: strata must not read them.
    return PassRates(names, rates, LONGEST * (SHORTEST / LONGEST) ** rates, readable=False)
