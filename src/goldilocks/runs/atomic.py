"""Files and folders that appear whole or not at all: made beside their place, then renamed.

A crash leaves the old one or the new one, never half of one, and two processes may make the same one at the same time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it takes the place of ``path`` when the block ends, and is removed if it fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file of text."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def make_folder(path: Path, make: Callable[[Path], None]) -> None:
    """Have ``make`` fill a folder, unless the folder is there already."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        make(unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(path)
        except OSError:  # a folder with something in it is not replaced: another process may have been quicker
            if not path.exists():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
