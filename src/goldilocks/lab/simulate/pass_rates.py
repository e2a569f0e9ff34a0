"""The pass rate and the answer lengths of each prompt, read from saved data or built in.

The columns of a file say how it is read: ``pass_rate`` per prompt, a list of ``rewards`` per prompt, or ``score`` per
rollout (as in verl's dumps), where the rows with the same prompt are counted together. Answers of a run that dropped
groups are refused: what it kept says nothing of the other prompts.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from goldilocks.core.beliefs import log_likelihood
from goldilocks.core.source import ListSource
from goldilocks.errors import require
from goldilocks.hashing import content_key
from goldilocks.runs import records
from goldilocks.runs.files import Lines
from goldilocks.runs.history import History
from goldilocks.runs.records import Record
from goldilocks.types import POSITIVE_THRESHOLD

DEFAULT_TOKENS = 512
CHARACTERS_PER_TOKEN = 4  # of English text, roughly; used where no column counts tokens
STATED = 1000.0  # answers that a pass rate counts as over where nothing says how many
MISSED = 3.0  # groups all right or all wrong that must be expected before their absence says that they were dropped
OTHER_RUN = "take a run that filtered nothing, such as goldilocks train grpo, or goldilocks pass-rates"

PROMPT_TEXTS = ("prompt", "input")
PROMPT_COLUMNS = (*PROMPT_TEXTS, "uid")
SCORE_COLUMNS = ("score", "reward")
LENGTH_COLUMNS = ("tokens", "mean_tokens", "response_length", "length")


@dataclass(frozen=True)
class PassRates:
    """For each prompt its content, the chance that an answer is right, and the mean tokens per answer.

    ``readable``: the contents are the texts of the prompts, not only names for them. ``trials``: how many answers the
    pass rates are over. ``lengths``: the tokens of the answers to each prompt, where the data say them.
    """

    contents: tuple[object, ...]
    pass_rate: np.ndarray
    tokens: np.ndarray
    readable: bool = True
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)  # what else the file says of each prompt
    trials: np.ndarray | float = STATED
    lengths: Sequence[Sequence[float]] = ()

    def __len__(self) -> int:
        return len(self.contents)

    def source(self) -> ListSource:
        """Return the prompts as a collector takes them."""
        return ListSource(self.contents, readable=self.readable, columns=self.columns)

    def drawn(self, rng: np.random.Generator) -> PassRates:
        """Return the prompts with pass rates that may be behind the answers: 0 right of 8 need not be impossible."""
        trials = np.broadcast_to(self.trials, len(self))
        passes = self.pass_rate * trials
        a, b = spread(passes, trials)
        return replace(self, pass_rate=rng.beta(a + passes, b + trials - passes))

    def some(self, most: int) -> PassRates:
        """Return ``most`` of the prompts, drawn at random, in their order."""
        if len(self) <= most:
            return self
        rows = np.sort(np.random.default_rng(0).choice(len(self), most, replace=False))
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        contents, trials = tuple(self.contents[row] for row in rows), np.broadcast_to(self.trials, len(self))[rows]
        lengths = [self.lengths[row] for row in rows] if self.lengths else ()
        return PassRates(contents, self.pass_rate[rows], self.tokens[rows], self.readable, columns, trials, lengths)

    def ordered_strata(self, column: str) -> np.ndarray:
        """Return the stratum of each prompt by a column: its place among the column's values, the easiest first."""
        values, strata = np.unique(list(map(str, self.source().column(column, "--lift"))), return_inverse=True)
        mean = np.bincount(strata, self.pass_rate) / np.bincount(strata)
        places = np.empty(len(values), dtype=np.int64)
        places[np.argsort(-mean, kind="stable")] = np.arange(len(values))
        return np.asarray(places[strata])


def read_pass_rates(path: Path | str) -> PassRates:
    """Read the prompts of a JSONL, CSV or parquet file, or of a directory of verl's dumps.

    Raise ``ValueError`` if the metrics beside a directory of dumps say that the run dropped groups.
    """
    rows, path = records.read_records(path), Path(path)
    dumps = path if path.is_dir() else path.parent
    for metrics in dumps.parent.glob("metrics*.jsonl") if path.is_dir() or path.stem.isdecimal() else ():
        if dropped := [name for name in History.of(Lines(metrics)).names if name.startswith("filter/dropped/")]:
            said = f"the run dropped groups ({metrics} has {dropped[0]}) and dumped those it kept"
            raise ValueError(f"{path}: {said}; {OTHER_RUN}")
    try:
        return interpret(rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _refuse_kept_groups(passes: np.ndarray, trials: np.ndarray) -> None:
    """Raise ``ValueError`` if no group is all right or all wrong although the pass rates promise several."""
    counted = (trials > 1) & (trials != STATED)
    passes, trials = passes[counted], trials[counted]
    if not len(trials) or ((passes == 0) | (passes == trials)).any():
        return
    a, b = spread(passes, trials)
    expected = sum(math.exp(log_likelihood(a, b, right, int(n))) for n in trials for right in (0, int(n)))
    if expected > MISSED:
        raise ValueError(
            f"none of {len(trials)} groups is all right or all wrong, where about {expected:.0f} should be: "
            f"the file is of a run that dropped them; {OTHER_RUN}"
        )


def spread(passes: np.ndarray, trials: np.ndarray) -> tuple[float, float]:
    """Return the Beta that the pass rates seem to be drawn from (beta-binomial, method of moments)."""
    mean, by_chance = passes.sum() / trials.sum(), (1 / trials).mean()
    require(0 < mean < 1, "pass_rate", float(mean), "more than 0 and less than 1 as the mean of all prompts")
    require(by_chance < 1, "trials", 1, "several answers to a prompt: one does not say how often it is answered right")
    between = ((passes / trials - mean) ** 2).mean() / (mean * (1 - mean))  # of the largest that it can be
    alike = 1 / np.clip((between - by_chance) / (1 - by_chance), 1e-4, 0.999) - 1
    return float(mean * alike), float((1 - mean) * alike)


def interpret(rows: Sequence[Record]) -> PassRates:
    """Return the prompts of rows; the columns of the first row say how to read them."""
    columns = rows[0].keys()
    if "pass_rate" in columns or "rewards" in columns:
        return _one_row_a_prompt(rows)
    score, prompt = records.first_column(SCORE_COLUMNS, columns), records.first_column(PROMPT_COLUMNS, columns)
    if score and prompt:
        return _one_row_a_rollout(rows, score, prompt)
    raise ValueError(
        "no columns that say a pass rate; accepted: pass_rate or rewards (a list), one row per prompt; or score with "
        f"prompt or input, one row per rollout; there are: {', '.join(columns)}"
    )


def _one_row_a_prompt(rows: Sequence[Record]) -> PassRates:
    def rate(row: Record) -> tuple[float, float]:
        """Return the pass rate of a prompt, and how many answers it is over."""
        if "pass_rate" in rows[0]:
            stated = records.number(row, "pass_rate")
            require(0 <= stated <= 1, "pass_rate", stated, "between 0 and 1")
            return stated, STATED
        passes = [reward >= POSITIVE_THRESHOLD for reward in _numbers(row, "rewards")]
        return sum(passes) / len(passes), len(passes)

    prompt = records.first_column(PROMPT_COLUMNS, rows[0])
    rates, trials = np.array(records.each_row(rate, rows)).T
    _refuse_kept_groups(rates * trials, trials)
    lengths = records.each_row(_lengths, rows) if "lengths" in rows[0] else []
    means = [math.fsum(one) / len(one) for one in lengths] or records.each_row(_length, rows)
    return PassRates(
        tuple(place if prompt is None else row.get(prompt) for place, row in enumerate(rows)),
        rates,
        np.maximum(means, 1.0),
        readable=prompt in PROMPT_TEXTS,
        columns=records.columns_of(rows),
        trials=trials,
        lengths=lengths,
    )


def _one_row_a_rollout(rows: Sequence[Record], score: str, prompt: str) -> PassRates:
    passes = records.each_row(lambda row: records.number(row, score) >= POSITIVE_THRESHOLD, rows)
    lengths = records.each_row(_length, rows)
    said = records.first_column((*LENGTH_COLUMNS, *records.TEXT_COLUMNS), rows[0])
    contents = records.each_row(lambda row: records.present(row, prompt), rows)
    rollouts: dict[int, list[int]] = {}
    groups: dict[tuple[int, object], list[bool]] = {}  # a prompt may be visited again in another step
    for place, content in enumerate(contents):
        rollouts.setdefault(content_key(content), []).append(place)
        groups.setdefault((content_key(content), rows[place].get("step")), []).append(passes[place])
    passed, asked = zip(*((sum(one), len(one)) for one in groups.values()), strict=True)
    _refuse_kept_groups(np.array(passed), np.array(asked))

    def means(values: Sequence[float]) -> np.ndarray:
        return np.array([math.fsum(values[place] for place in places) / len(places) for places in rollouts.values()])

    firsts = [places[0] for places in rollouts.values()]
    of_prompts = {  # what the rows of a prompt agree in; the rest is of the answers
        name: [values[place] for place in firsts]
        for name, values in records.columns_of(rows).items()
        if all(values[place] == values[places[0]] for places in rollouts.values() for place in places)
    }
    return PassRates(
        tuple(contents[place] for place in firsts),
        means(passes),
        means(lengths),
        readable=prompt in PROMPT_TEXTS,
        columns=of_prompts,
        trials=np.array([len(places) for places in rollouts.values()], dtype=float),
        lengths=[[lengths[place] for place in places] for places in rollouts.values()] if said else (),
    )


def _numbers(row: Record, column: str) -> list[float]:
    values = records.present(row, column)
    if isinstance(values, str):  # CSV has no lists: a list is written as JSON there
        with contextlib.suppress(ValueError):
            values = json.loads(values)
    several = isinstance(values, list) and len(values) > 0
    require(several, column, values, "a list of at least one number, such as [0, 1, 1]")
    assert isinstance(values, list)
    return [records.number({column: value}, column) for value in values]


def _lengths(row: Record) -> list[float]:
    tokens = _numbers(row, "lengths")
    require(min(tokens) >= 0, "lengths", min(tokens), "numbers of tokens, 0 or more")
    return tokens


def _length(row: Record) -> float:
    if column := records.first_column(LENGTH_COLUMNS, row):
        tokens = records.number(row, column)
        require(tokens >= 0, column, tokens, "a number of tokens, 0 or more")
        return max(tokens, 1.0)
    text = records.first_column(records.TEXT_COLUMNS, row)
    return max(len(str(row[text])) / CHARACTERS_PER_TOKEN, 1.0) if text else float(DEFAULT_TOKENS)


LONGEST, SHORTEST = 1400, 200  # mean tokens of an answer that is never right, and of one that always is
# Name, number of prompts, and the lowest and the highest of their pass rates, which are spread evenly.
DIFFICULTIES = (
    ("impossible", 400, 0.0, 0.0),
    ("hard", 500, 0.01, 0.2),
    ("medium", 500, 0.2, 0.8),
    ("easy", 300, 0.8, 0.99),
    ("trivial", 300, 1.0, 1.0),
)


def mixture() -> PassRates:
    """Return the built-in data set: 2,000 prompts, as mixed in difficulty as reasoning data are for a fresh model.

    Harder prompts have longer answers: a geometric path from SHORTEST to LONGEST. The data set does not depend on the
    seed of a simulation, so two seeds differ by sampling alone.
    """
    rates = np.concatenate([np.linspace(lowest, highest, prompts) for _, prompts, lowest, highest in DIFFICULTIES])
    names = tuple(f"{name} {number}" for name, prompts, *_ in DIFFICULTIES for number in range(prompts))
    # The names tell the difficulty: strata must not read them.
    return PassRates(names, rates, LONGEST * (SHORTEST / LONGEST) ** rates, readable=False)
