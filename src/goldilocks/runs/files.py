"""Files and folders that appear whole or not at all, and files of JSON lines.

A file or folder is made beside its place, then renamed. A crash leaves the old one or the new one, never half of one,
and two processes may make the same one at the same time. JSON lines are read strictly, read with broken lines skipped,
or followed while they are written.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Object = dict[str, Any]


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
    """Write a text file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def make_folder(path: Path, make: Callable[[Path], None]) -> None:
    """Let ``make`` fill a folder, unless the folder is there already."""
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


def read_objects(path: Path) -> Iterator[Object]:
    """Yield every object of a file. A line that holds none is an error that names the file and the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield _parse(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from None


class Lines:
    """The objects of a file that may still be written to; ``broken`` counts the lines that held none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken = 0

    def __iter__(self) -> Iterator[Object]:
        with self.path.open("rb") as file:
            for line in file:
                try:
                    yield _parse(line)
                except ValueError:
                    self.broken += bool(line.strip())


class Tail:
    """The objects that were appended to a file since the last call of ``new``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[Object]:
        """Yield the new objects. A line without its end is left for the next call, and a broken line is skipped."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    yield _parse(line)
                except ValueError:
                    continue


def _parse(line: bytes) -> Object:
    try:
        value = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"a row must be a JSON object, this is a {type(value).__name__}")
    return value
