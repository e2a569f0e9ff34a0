"""JSON lines of a file that may still be written to: what is whole is read, what is not is counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Lines:
    """Iterate for the objects, one at a time; afterwards ``broken`` says how many lines were none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.path.open("rb") as file:
            for line in file:
                value = _parse(line)
                if isinstance(value, dict):
                    yield value
                elif line.strip():
                    self.broken += 1


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # also what is not UTF-8; the last line of a file that is being written is cut anywhere
        return None
