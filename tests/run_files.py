"""What a run has written, as tests read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_lines(file: Path) -> list[Any]:
    """Return the object on each line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def logged(run: Path) -> list[dict[str, Any]]:
    """Return what ``metrics.jsonl`` has of each record."""
    return [record["data"] for record in json_lines(run / "metrics.jsonl")]
