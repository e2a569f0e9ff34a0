"""The collector's beliefs about the prompts it has visited, read from checkpoints.

A belief is a Beta posterior over a prompt's pass rate. It is stored under the prompt's key, a hash of the prompt's
content. A reader finds the text by the same hash, and shows the key where there is no text.
"""

from __future__ import annotations

import math
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from goldilocks.runs.checkpoint import load_state

FILE = "goldilocks.npz"
_FOLDER = re.compile(r"((global|interrupted)_step_|checkpoint-)(?P<step>\d+)")  # verl's and TRL's
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
    """All beliefs of a checkpoint, the most visited prompts first."""

    step: int
    rows: tuple[Belief, ...]


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Return the saved collectors by step: of verl's and TRL's checkpoints, and of interrupted steps."""
    folders = {folder: _FOLDER.fullmatch(folder.name) for folder in directory.glob("*[_-]*")}
    found = [(int(match["step"]), folder / FILE) for folder, match in folders.items() if match]
    return sorted((step, file) for step, file in found if file.is_file())


def read_beliefs(step: int, file: Path) -> Beliefs:
    """Return the beliefs in one saved collector. Raises ``ValueError`` if the file holds none or is incomplete."""
    try:
        ledger = load_state(file)["collector"]["ledger"]
        columns = [ledger[name].tolist() for name in COLUMNS]
        flat = np.ones((2, len(columns[0])))  # of a run from before there were priors
        columns += np.asarray(ledger.get("priors", flat)).tolist()
    except (KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} holds no beliefs: {error}") from error
    rows = [_belief(*values) for values in zip(*columns, strict=True)]
    return Beliefs(step, tuple(sorted(rows, key=lambda row: (-row.visits, row.key))))


def _belief(
    key: int,
    positives: float,
    negatives: float,
    visits: int,
    streak: int,
    tokens: float,
    last_step: int,
    passes: float,
    failures: float,
) -> Belief:
    """``passes`` and ``failures`` are the prior's."""
    a, b = passes + positives, failures + negatives
    spread = math.sqrt(a * b / (a + b + 1)) / (a + b)
    return Belief(key, a / (a + b), spread, visits, streak, tokens, last_step)
