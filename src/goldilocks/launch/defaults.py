"""The model and data of the default task, made the first time they are needed and then kept in the user's cache.

Invariant: what is in the cache is whole. Each part is made beside its place and moved there when it is done.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

VERSION = "1"  # raised when what is made here changes, so that nobody trains on what an older version made
VARIABLE = "GOLDILOCKS_ARITHMETIC"  # where config/task/arithmetic.yaml looks for it

TRAIN, VALIDATION = 2048, 256


def folder() -> Path:
    """Where the default task lives; ``GOLDILOCKS_ARITHMETIC`` moves it."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "goldilocks" / f"arithmetic-{VERSION}"


def make_missing() -> None:
    """Make the data and the model, each only if it is not there."""
    _once(folder() / "data", _make_data)
    _once(folder() / "model", _make_model)


def _once(place: Path, make: Callable[[Path], None]) -> None:
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        make(unfinished)
        unfinished.chmod(0o755)
        if not place.exists():  # another run may have been quicker
            unfinished.rename(place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _make_data(out: Path) -> None:
    from goldilocks.tasks.arithmetic import Arithmetic
    from goldilocks.tasks.base import write_split

    task = Arithmetic()
    write_split(out, task.data_source, "train", task.problems("train", TRAIN, seed=0))
    write_split(out, task.data_source, "val", task.problems("val", VALIDATION, seed=0))


def _make_model(out: Path) -> None:
    from goldilocks.tasks.tiny_model import make

    make(out)
