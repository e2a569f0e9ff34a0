"""A ``state_dict`` on disk, JSON and its arrays in one ``.npz`` file, and the collectors' beliefs read from such files.

Loading executes no code. In the JSON, an object with one key, a mark, stands for a value that JSON lacks. A belief is
stored under the prompt's key, a hash of the prompt's content. A reader finds the text by the same hash, and shows the
key where there is no text.

Of TRL's checkpoints, the last whole one is found. transformers writes ``trainer_state.json`` after everything else in
the folder, and deletes older checkpoints only then. A folder without that file, or with half of it, belongs to a run
that ended while it was being written.
"""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from goldilocks.runs.files import replacing

logger = logging.getLogger(__name__)

FILE = "goldilocks.npz"
COLUMNS = ("keys", "visits", "streak", "tokens")
_STATE = "state"
_FOLDER = re.compile(r"(global_step_|checkpoint-)(?P<step>\d+)")  # verl's and TRL's
ARRAY, PAIRS = "__array__", "__pairs__"

Leaf = Callable[[Any], Any]
LAST_FILE = "trainer_state.json"
OF_TRL = "checkpoint-"


def save_state(state: dict[str, Any], path: str | Path) -> None:
    """Write a nested state of JSON values and numpy arrays, whole or not at all."""
    path = Path(path)
    arrays: dict[str, np.ndarray] = {}

    def leaf(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value.item() if isinstance(value, np.generic) else value
        name = f"array{len(arrays)}"
        arrays[name] = value
        return {ARRAY: name}

    text = json.dumps(to_json(state, leaf, {ARRAY: leaf}))
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **{_STATE: np.frombuffer(text.encode(), dtype=np.uint8), **arrays})


def load_state(path: str | Path) -> dict[str, Any]:
    """Return what ``save_state`` wrote."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        state = json.loads(arrays.pop(_STATE).tobytes())
    except (KeyError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is not a saved state: {error}") from error
    return dict(from_json(state, {ARRAY: arrays.__getitem__}))


@dataclass(frozen=True)
class SavedBelief:
    """The belief about one prompt. ``pass_rate`` and ``spread`` are the posterior's mean and standard deviation."""

    key: int
    pass_rate: float
    spread: float
    visits: int
    streak: int
    tokens: float


@dataclass(frozen=True)
class SavedBeliefs:
    """All beliefs of a checkpoint, the most visited prompts first."""

    step: int
    rows: tuple[SavedBelief, ...]


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Return the saved collectors by step: of verl's and TRL's checkpoints."""
    folders = {folder: _FOLDER.fullmatch(folder.name) for folder in directory.glob("*[_-]*")}
    found = [(int(match["step"]), folder / FILE) for folder, match in folders.items() if match]
    return sorted((step, file) for step, file in found if file.is_file())


def read_beliefs(step: int, file: Path) -> SavedBeliefs:
    """Return the beliefs in one saved collector. Raises ``ValueError`` if the file holds none or is incomplete."""
    try:
        beliefs = load_state(file)["collector"]["beliefs"]
        columns = [beliefs[name].tolist() for name in COLUMNS]
        right, wrong = beliefs["posterior"]
    except (KeyError, TypeError, AttributeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} holds no beliefs: {error}") from error
    both = right + wrong
    means, spreads = right / both, np.sqrt(right * wrong / (both + 1)) / both
    rows = [
        SavedBelief(key, mean, spread, *counts)
        for key, mean, spread, *counts in zip(columns[0], means.tolist(), spreads.tolist(), *columns[1:], strict=True)
    ]
    return SavedBeliefs(step, tuple(sorted(rows, key=lambda row: (-row.visits, row.key))))


def to_json(value: Any, leaf: Leaf, marks: Mapping[str, object]) -> Any:
    """Return JSON for dicts, lists and plain values; ``leaf`` returns the JSON of any other value.

    JSON has text keys only, and a key of the user's may be one of ``marks``: such a dict becomes a list of pairs.
    """
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != PAIRS and key not in marks for key in value):
            return {key: to_json(item, leaf, marks) for key, item in value.items()}
        return {PAIRS: [[to_json(one, leaf, marks) for one in pair] for pair in value.items()]}
    if isinstance(value, (list, tuple)):
        return [to_json(item, leaf, marks) for item in value]
    return value if value is None or isinstance(value, (str, bool, int, float)) else leaf(value)


def from_json(value: Any, marks: Mapping[str, Leaf]) -> Any:
    """Return what ``to_json`` was given; a mark's function returns the value that the mark stands for."""
    if isinstance(value, list):
        return [from_json(item, marks) for item in value]
    if not isinstance(value, dict):
        return value
    mark: str = next(iter(value)) if len(value) == 1 else ""
    if mark == PAIRS:
        return {from_json(key, marks): from_json(item, marks) for key, item in value[PAIRS]}
    if mark in marks:
        return marks[mark](value[mark])
    return {key: from_json(item, marks) for key, item in value.items()}


def last_whole(root: Path) -> Path | None:
    """Return TRL's whole checkpoint of the most updates, and log which ones are skipped and why."""
    for folder in trl_checkpoints(root).values():
        fault = torn(folder)
        if fault is None:
            return folder
        logger.warning("%s is skipped: %s. The run ended while it was being written.", folder, fault)
    return None


def trl_checkpoints(root: Path) -> dict[int, Path]:
    """Return TRL's checkpoints by how many updates their weights have had, the most first."""
    folders = [folder for folder in root.glob(f"{OF_TRL}*") if folder.is_dir()]
    found = {folder.name.removeprefix(OF_TRL): folder for folder in folders}
    return {int(updates): found[updates] for updates in sorted(filter(str.isdecimal, found), key=int, reverse=True)}


def torn(folder: Path) -> str | None:
    """Return what a checkpoint lacks, or None if it is whole."""
    try:
        json.loads((folder / LAST_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {LAST_FILE}, which is written last"
    except ValueError:
        return f"its {LAST_FILE} breaks off"
    return None


def begin_again(folder: Path) -> None:
    """Mark a checkpoint of TRL's that is about to be written again as not whole."""
    (folder / LAST_FILE).unlink(missing_ok=True)
