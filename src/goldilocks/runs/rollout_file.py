"""A file of rollouts that grows by whole groups, so that a pass that was cut goes on where it ended.

A line is a rollout as verl dumps it (``input, output, gts, score, step, uid``), with its ``tokens`` and the columns of
its prompt's row. ``step`` counts blocks of prompts in the order in which they were chosen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from goldilocks.errors import require
from goldilocks.runs.atomic import replacing
from goldilocks.runs.jsonl import Lines
from goldilocks.runs.records import split_row_key

Row = Mapping[str, Any]


class Append(Protocol):
    """Writes the rollouts of one prompt."""

    def __call__(self, group: Sequence[Row]) -> None: ...


def whole_groups(path: Path, n: int) -> dict[str, list[Row]]:
    """Return the groups of ``n`` rollouts that the file holds, by uid; what a crash left unfinished is not one."""
    groups: dict[str, list[Row]] = {}
    for row in Lines(path) if path.exists() else ():
        require("uid" in row and "score" in row, "--out", str(path), "a new file, or one of goldilocks pass-rates")
        groups.setdefault(split_row_key(str(row["uid"]))[0], []).append(row)
    larger = max(map(len, groups.values()), default=n)
    require(larger <= n, "--n", n, f"{larger} rollouts a prompt, as {path} has them, or another --out")
    return {uid: rows for uid, rows in groups.items() if len(rows) == n}


@contextmanager
def growing(path: Path, kept: Mapping[str, Sequence[Row]]) -> Iterator[Append]:
    """Begin the file with the groups kept, and yield a function that appends one group and has it on disk at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        unfinished.write_text("".join(map(_lines, kept.values())), encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:

        def append(group: Sequence[Row]) -> None:
            file.write(_lines(group))
            file.flush()

        yield append


def _lines(group: Sequence[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in group)
