"""Files of rollouts: the one that ``goldilocks pass-rates`` grows, and the ones that verl dumps.

The growing file gains whole groups, so that a pass that was cut goes on where it ended. A line is a rollout as verl
dumps it (``input, output, gts, score, step, uid``), with its ``tokens`` and the columns of its prompt's row. ``step``
counts blocks of prompts in the order in which they were chosen.

verl dumps (``trainer.rollout_data_dir``) a file per step and a line per trained answer. A long run dumps more than a
report can show. So at most ``MOST`` steps are read, evenly spaced with the first and the last, and only the scores and
two answers of each group are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from goldilocks.errors import require
from goldilocks.runs.files import Lines, replacing
from goldilocks.runs.records import dump_files, group_uids, json_lines, split_row_key
from goldilocks.types import POSITIVE_THRESHOLD

Row = Mapping[str, Any]
MOST = 40
GROUPS_WITH_ANSWERS = 6


def whole_groups(path: Path, n: int) -> dict[str, list[Row]]:
    """Return the groups of ``n`` rollouts that the file holds, by uid; groups that a crash cut short are left out."""
    groups: dict[str, list[Row]] = {}
    for row in Lines(path) if path.exists() else ():
        require("uid" in row and "score" in row, "--out", str(path), "a new file, or one of goldilocks pass-rates")
        groups.setdefault(split_row_key(str(row["uid"]))[0], []).append(row)
    larger = max(map(len, groups.values()), default=n)
    require(larger <= n, "--n", n, f"{larger} rollouts a prompt, as {path} has them, or another --out")
    return {uid: rows for uid, rows in groups.items() if len(rows) == n}


@contextmanager
def growing(path: Path, kept: Mapping[str, Sequence[Row]]) -> Iterator[Callable[[Sequence[Row]], None]]:
    """Begin the file with the groups kept, and yield a function that appends one group and has it on disk at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
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


@dataclass
class GroupDump:
    """The answers to one prompt in one step: every score, and the best and the worst answer."""

    prompt: str
    truth: str | None
    scores: list[float] = field(default_factory=list)
    best: DumpedAnswer | None = None
    worst: DumpedAnswer | None = None

    def add(self, answer: DumpedAnswer) -> None:
        self.scores.append(answer.score)
        if self.best is None or answer.score > self.best.score:
            self.best = answer
        if self.worst is None or answer.score < self.worst.score:
            self.worst = answer

    @property
    def pass_rate(self) -> float:
        return sum(score >= POSITIVE_THRESHOLD for score in self.scores) / len(self.scores)

    @property
    def answers(self) -> list[DumpedAnswer]:
        """Return the best answer, and the worst if its score differs."""
        pair = [answer for answer in (self.best, self.worst) if answer is not None]
        return pair if len(pair) == 2 and pair[0].score != pair[1].score else pair[:1]


@dataclass(frozen=True)
class Dump:
    """One step's groups."""

    step: int
    groups: tuple[GroupDump, ...]
    broken: int = 0


def read_dumps(directory: Path) -> list[Dump]:
    """Return the dumps of the steps that the report shows."""
    files = [(file, file.stat()) for file in evenly(dump_files(directory), MOST)]
    dumps = [_read(file, stat.st_mtime_ns, stat.st_size) for file, stat in files]
    return [dump for dump in dumps if dump.groups or dump.broken]


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


@lru_cache(maxsize=1024)  # a live report reads a dump once, not at every refresh
def _read(file: Path, modified: int, size: int) -> Dump:
    lines = Lines(file)
    groups: dict[str, GroupDump] = {}
    malformed = 0
    for row in lines:
        if not _is_answer(row):
            malformed += 1
            continue
        truth = None if row["gts"] is None else _clean(str(row["gts"]))
        group = groups.setdefault(group_uids([row])[0], GroupDump(_clean(row["input"]), truth))
        group.add(DumpedAnswer(_clean(row["output"]), float(row["score"])))
    return Dump(int(file.stem), tuple(groups.values()), lines.broken + malformed)


def _is_answer(row: Mapping[str, Any]) -> bool:
    texts = isinstance(row.get("input"), str) and isinstance(row.get("output"), str)
    return texts and isinstance(row.get("score"), (int, float)) and "step" in row and "gts" in row


def _clean(text: str) -> str:
    """Return text that can be encoded: half a surrogate pair, which a model can write, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")
