"""Saved rollouts as rows: one ``dict`` per rollout, in the order of the file.

JSONL, CSV, parquet and a directory of verl's dumps (``trainer.rollout_data_dir``) give the same rows. No column is
renamed, dropped or added. A file that cannot be read completely is an error that names the line.

verl writes one ``<step>.jsonl`` per step with ``input, output, gts, score, step`` and then

- V0 (``RayPPOTrainer``): the reward function's extra infos, ``request_id`` where the rollout has one, and no uid;
- V1 (``trainer.use_v1``): ``uid``, which is not the group's but the row's key ``{group}_{rollout}_{part}``. Rows are in
  the order of their keys, and the parts of a rollout are joined.

A long run dumps more than a report can show. So at most ``MOST_STEPS`` are read, evenly spaced with the first and the
last, and only the scores and two answers of each group are kept.

``goldilocks pass-rates`` grows a file of the same form, by whole groups, so that a pass that was cut goes on where it
ended. Its lines have the ``tokens`` and the columns of the prompt's row too. ``step`` counts blocks of prompts in the
order in which they were chosen.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from goldilocks.errors import require
from goldilocks.runs.files import Lines, read_objects, replacing
from goldilocks.types import POSITIVE_THRESHOLD, ROW_KEY, split_row_key

Record = dict[str, object]
T = TypeVar("T")

VERL_DUMP_KEYS = frozenset({"input", "output", "gts", "score", "step"})
TEXT_COLUMNS = ("output", "response")  # of an answer; the first is verl's
Row = Mapping[str, Any]
MOST_STEPS = 40
GROUPS_WITH_ANSWERS = 6


def read_records(path: Path | str) -> list[Record]:
    """Return every rollout of a ``.jsonl``, ``.csv`` or ``.parquet`` file, or of a directory of verl's dumps."""
    path = Path(path)
    if path.is_dir():
        files = dump_files(path)
        if not files:
            raise ValueError(f"{path}: no <step>.jsonl file in this directory, as verl's rollout_data_dir has them")
        return [row for file in files for row in read_records(file)]
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: unknown extension {path.suffix!r}; accepted are {', '.join(_READERS)}")
    rows = list(whole_rollouts(reader(path)))
    if not rows:
        raise ValueError(f"{path}: the file holds no rows")
    return rows


def whole_rollouts(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one row for each rollout: neighbours in verl's V1 dumps that are parts of one are joined."""

    def rollout(numbered: tuple[int, dict[str, Any]]) -> object:
        """Return the name of a row's rollout; the row's number where it is none of verl's V1 dumps."""
        number, row = numbered
        uid = row.get("uid")
        part = row.keys() >= VERL_DUMP_KEYS and isinstance(uid, str) and ROW_KEY.fullmatch(uid) is not None
        return (str(row["step"]), split_row_key(str(uid))) if part else number

    for _, parts in itertools.groupby(enumerate(rows), rollout):
        first, *others = (row for _, row in parts)
        yield {**first, "output": "\n".join(str(part["output"]) for part in (first, *others))} if others else first


def group_uid(row: Mapping[str, object]) -> str:
    """Return the group of a row of verl's dumps.

    V0 names no group: rows of one step with the same ``input`` are one, so a prompt drawn twice in a step is one group.
    """
    if "uid" not in row:
        return f"{row['step']}/{row['input']}"
    found = ROW_KEY.fullmatch(uid := str(row["uid"]))
    return found["group"] if found else uid


def first_column(names: Sequence[str], columns: Iterable[str]) -> str | None:
    there = set(columns)
    return next((name for name in names if name in there), None)


def present(row: Mapping[str, object], column: str) -> object:
    """Return the value of a column, which must be there."""
    if row.get(column) is None:
        raise ValueError(f"no value in column {column!r}; there are: {', '.join(row)}")
    return row[column]


def number(row: Mapping[str, object], column: str) -> float:
    """Return the number in a column; a bool is the number it counts as."""
    value = present(row, column)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{column}={value!r} is not accepted: a finite number")
    return float(value)


def each_row(read: Callable[[Record], T], rows: Sequence[Record]) -> list[T]:
    """Return ``read`` of every row; an error names the row, counted from 1."""
    values = []
    for place, row in enumerate(rows, start=1):
        try:
            values.append(read(row))
        except ValueError as error:
            raise ValueError(f"row {place}: {error}") from None
    return values


def columns_of(rows: Sequence[Record]) -> dict[str, list[object]]:
    """Return the columns of the rows and of their ``extra_info``; what a row lacks is None."""
    infos = [{**dict(info if isinstance(info := row.get("extra_info"), Mapping) else {}), **row} for row in rows]
    names = dict.fromkeys(name for info in infos for name in info)
    return {name: [info.get(name) for info in infos] for name in names}


def dump_files(directory: Path) -> list[Path]:
    """Return verl's ``<step>.jsonl`` files by step: 10 comes after 9."""
    files = [file for file in directory.glob("*.jsonl") if file.stem.isdecimal()]
    return sorted(files, key=lambda file: int(file.stem))


def _read_csv(path: Path) -> list[Record]:
    from pyarrow import ArrowInvalid, csv

    if path.stat().st_size == 0:
        return []
    # One block, so that a column's type is inferred from all its values and no long answer spans two blocks.
    options = csv.ReadOptions(use_threads=False, block_size=path.stat().st_size + 1)
    try:
        table = csv.read_csv(path, options, csv.ParseOptions(newlines_in_values=True))
    except ArrowInvalid as error:
        number = re.search(r"Row #(\d+)", str(error))
        where = f"{path}:{number[1]}" if number else str(path)
        raise ValueError(f"{where}: {str(error).splitlines()[0]}") from None
    return table.to_pylist()


def _read_parquet(path: Path) -> list[Record]:
    from pyarrow import ArrowInvalid, parquet

    try:
        return parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file: {str(error).splitlines()[0]}") from None


def json_lines(rows: Iterable[Mapping[str, object]]) -> str:
    """Return a line of JSON for each row; a value that JSON lacks is written as its text."""
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


_READERS: dict[str, Callable[[Path], list[Record]]] = {
    ".jsonl": lambda path: list(read_objects(path)),
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def whole_groups(path: Path, n: int) -> dict[str, list[Row]]:
    """Return the groups of ``n`` rollouts that the file holds, by uid; groups that a crash cut short are left out."""
    groups: dict[str, list[Row]] = {}
    lines, ours = Lines(path), "a new file, or one of goldilocks pass-rates"
    for row in lines if path.exists() else ():
        require("uid" in row and "score" in row, "--out", str(path), ours)
        groups.setdefault(split_row_key(str(row["uid"]))[0], []).append(row)
    require(lines.broken <= 1, "--out", str(path), ours)  # the last one, which a crash cut
    most = max(map(len, groups.values()), default=n)
    cut = most < n and len(groups) == 1  # groups are written one by one: the last may be cut, and no other
    require(most == n or cut, "--n", n, f"{most} rollouts a prompt, as {path} has them, or another --out")
    return {uid: rows for uid, rows in groups.items() if len(rows) == n}


@contextmanager
def growing(path: Path, kept: Mapping[str, Sequence[Row]]) -> Iterator[Callable[[Sequence[Row]], None]]:
    """Begin the file with the groups kept, and yield a function that appends one group and has it on disk at once."""
    with replacing(path) as unfinished:
        unfinished.write_text("".join(map(json_lines, kept.values())), encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:

        def append(group: Sequence[Row]) -> None:
            file.write(json_lines(group))
            file.flush()

        yield append


@dataclass(frozen=True)
class DumpedAnswer:
    """One answer, as it was written."""

    text: str
    score: float


@dataclass(frozen=True)
class GroupDump:
    """The answers to one prompt in one step: every score, the best answer, and the worst if its score differs."""

    prompt: str
    truth: str | None
    scores: list[float]
    answers: list[DumpedAnswer]
    key: int | None = None  # the prompt's, in dumps of ours

    @classmethod
    def of(cls, rows: Sequence[Row]) -> GroupDump:
        """Make it of the group's rows."""
        scores = [float(row["score"]) for row in rows]
        ends = dict.fromkeys((max(scores), min(scores)))  # one where all are the same
        answers = [DumpedAnswer(_clean(rows[scores.index(score)]["output"]), score) for score in ends]
        truth = rows[0]["gts"]
        asked, right = _clean(rows[0]["input"]), None if truth is None else _clean(str(truth))
        return cls(asked, right, scores, answers, rows[0].get("key"))

    @property
    def pass_rate(self) -> float:
        return sum(score >= POSITIVE_THRESHOLD for score in self.scores) / len(self.scores)


@dataclass(frozen=True)
class Dump:
    """One step's groups."""

    step: int
    groups: tuple[GroupDump, ...]
    broken: int = 0


def read_dumps(directory: Path) -> list[Dump]:
    """Return the dumps of the steps that the report shows."""
    dumps = [_read_dump(file) for file in evenly(dump_files(directory), MOST_STEPS)]
    return [dump for dump in dumps if dump.groups or dump.broken]


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _read_dump(file: Path) -> Dump:
    lines = Lines(file)
    groups: dict[str, list[Row]] = {}
    malformed = 0
    for row in whole_rollouts(lines):
        texts = isinstance(row.get("input"), str) and isinstance(row.get("output"), str)
        if texts and isinstance(row.get("score"), (int, float)) and "step" in row and "gts" in row:
            groups.setdefault(group_uid(row), []).append(row)
        else:
            malformed += 1
    return Dump(int(file.stem), tuple(map(GroupDump.of, groups.values())), lines.broken + malformed)


def _clean(text: str) -> str:
    """Return text that can be encoded: half a surrogate pair, which a model can write, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")
