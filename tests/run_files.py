"""What a run has written, as tests read it, rollouts as they are saved, and a task that has been made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet


def json_lines(file: Path) -> list[Any]:
    """Return the object on each line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_records(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as ``.jsonl`` or ``.parquet``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_task(folder: Path) -> Path:
    """Make the folder of a task whose model and data exist, so that nothing is made and only a word may be wrong."""
    (folder / "model").mkdir(parents=True)
    for split in ("train", "val"):
        write_records(folder / "data" / f"{split}.parquet", [{"prompt": "1 + 1 ="}])
    return folder


def logged(run: Path) -> list[dict[str, Any]]:
    """Return what ``metrics.jsonl`` has of each record."""
    return [record["data"] for record in json_lines(run / "metrics.jsonl")]


def groups_in(dump: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows that a step has trained by group, padding left out."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in json_lines(dump):
        group = row["uid"].rsplit("_", 2)[0]
        if not group.startswith("pad"):
            groups.setdefault(group, []).append(row)
    return groups


def batches_of(run: Path) -> list[dict[str, list[dict[str, Any]]]]:
    """Return the rows of every step's batch by group, in the order of the steps."""
    return [groups_in(dump) for dump in sorted((run / "rollouts").glob("*.jsonl"), key=lambda dump: int(dump.stem))]
