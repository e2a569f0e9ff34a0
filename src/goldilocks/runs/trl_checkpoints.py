"""TRL's checkpoints on disk: which of them were written to their end.

transformers writes ``trainer_state.json`` after everything else in the folder, and deletes older checkpoints only then.
A folder without that file, or with half of it, belongs to a run that ended while it was being written.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

logger = logging.getLogger(__name__)

LAST_FILE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def last_whole(root: Path) -> Path | None:
    """Return the checkpoint of the most updates that is whole, and log which ones are skipped and why."""
    for folder in sorted(checkpoints(root), key=updates, reverse=True):
        fault = torn(folder)
        if fault is None:
            return folder
        logger.warning("%s is skipped: %s. The run ended while it was being written.", folder, fault)
    return None


def updates(folder: Path) -> int:
    """Return how many updates the weights of a checkpoint have had."""
    found = _NAME.fullmatch(folder.name)
    assert found is not None, f"{folder} is not a checkpoint of TRL's"
    return int(found[1])


def torn(folder: Path) -> str | None:
    """Return what a checkpoint lacks, or None if it is whole."""
    try:
        json.loads((folder / LAST_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {LAST_FILE}, which is written last"
    except ValueError:
        return f"its {LAST_FILE} breaks off"
    return None


def begin(folder: Path) -> None:
    """Mark a checkpoint that is about to be written again as not whole."""
    (folder / LAST_FILE).unlink(missing_ok=True)


def checkpoints(root: Path) -> list[Path]:
    there = root.iterdir() if root.is_dir() else ()
    return [folder for folder in there if _NAME.fullmatch(folder.name) and folder.is_dir()]
