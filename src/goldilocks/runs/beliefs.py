"""What the collector believed of every prompt it had visited, as the checkpoints hold it.

A belief is a Beta posterior over the prompt's pass rate. It hangs on the prompt's key, a hash of its content, so the
prompt's text is looked up by the same hash; where no text is found, the key stands in for it.
"""

from __future__ import annotations

import math
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from goldilocks.runs.checkpoint import load_state

FILE = "goldilocks.npz"
_FOLDER = re.compile(r"(global|interrupted)_step_(?P<step>\d+)")
COLUMNS = ("keys", "positives", "negatives", "visits", "streak", "tokens", "last_step")


@dataclass(frozen=True)
class Belief:
    """One prompt. ``pass_rate`` and ``spread``: the posterior's mean and standard deviation."""

    key: int
    pass_rate: float
    spread: float
    visits: int
    streak: int
    tokens: float
    last_step: int


@dataclass(frozen=True)
class Beliefs:
    """All of them, when ``step`` was saved; the most visited first."""

    step: int
    rows: tuple[Belief, ...]


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """The collectors saved with verl's checkpoints, and those of a step that did not end, by step."""
    folders = {folder: _FOLDER.fullmatch(folder.name) for folder in directory.glob("*_step_*")}
    found = [(int(match["step"]), folder / FILE) for folder, match in folders.items() if match]
    return sorted((step, file) for step, file in found if file.is_file())


def read_beliefs(step: int, file: Path) -> Beliefs:
    """The ledger in one saved collector. Raises ``ValueError`` when the file holds none, or only half."""
    try:
        ledger = load_state(file)["collector"]["ledger"]
        columns = [ledger[name].tolist() for name in COLUMNS]
    except (KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} holds no beliefs: {error}") from error
    rows = [_belief(*values) for values in zip(*columns, strict=True)]
    return Beliefs(step, tuple(sorted(rows, key=lambda row: (-row.visits, row.key))))


def _belief(
    key: int, positives: float, negatives: float, visits: int, streak: int, tokens: float, last_step: int
) -> Belief:
    a, b = 1 + positives, 1 + negatives
    spread = math.sqrt(a * b / (a + b + 1)) / (a + b)
    return Belief(key, a / (a + b), spread, visits, streak, tokens, last_step)
