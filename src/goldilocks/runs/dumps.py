"""Answers that verl dumped (``trainer.rollout_data_dir``): a file per step and a line per trained answer.

A long run dumps more than a report can show. So at most ``MOST`` steps are read, evenly spaced with the first and the
last, and only the scores and a few answers of each group are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from goldilocks.runs.jsonl import Lines
from goldilocks.runs.records import dump_files, group_uids

MOST = 40
GROUPS_WITH_ANSWERS = 6
POSITIVE_THRESHOLD = 0.5


@dataclass(frozen=True)
class Answer:
    """One answer, as it was written."""

    text: str
    score: float


@dataclass
class GroupDump:
    """The answers to one prompt in one step: every score, and the best and the worst answer."""

    prompt: str
    truth: str | None
    scores: list[float] = field(default_factory=list)
    best: Answer | None = None
    worst: Answer | None = None

    def add(self, answer: Answer) -> None:
        self.scores.append(answer.score)
        if self.best is None or answer.score > self.best.score:
            self.best = answer
        if self.worst is None or answer.score < self.worst.score:
            self.worst = answer

    @property
    def pass_rate(self) -> float:
        return sum(score >= POSITIVE_THRESHOLD for score in self.scores) / len(self.scores)

    @property
    def answers(self) -> list[Answer]:
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
    dumps = [_read(file, *_signature(file)) for file in evenly(dump_files(directory), MOST)]
    return [dump for dump in dumps if dump.groups or dump.broken]


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _signature(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size


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
        group = groups.setdefault(_uid(row), GroupDump(_clean(row["input"]), truth))
        group.add(Answer(_clean(row["output"]), float(row["score"])))
    return Dump(int(file.stem), tuple(groups.values()), lines.broken + malformed)


def _is_answer(row: Mapping[str, Any]) -> bool:
    texts = isinstance(row.get("input"), str) and isinstance(row.get("output"), str)
    return texts and isinstance(row.get("score"), (int, float)) and "step" in row and "gts" in row


def _clean(text: str) -> str:
    """Return text that can be encoded: half a surrogate pair, which a model can write, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _uid(row: Mapping[str, Any]) -> str:
    return group_uids([row])[0]
