"""The directory of a run, and how its files are written and read.

Files of an earlier start are kept, under other names. A file or folder is made beside its place, then renamed. A crash
leaves the old one or the new one, never half of one, and two processes may make the same one at the same time. JSON
lines are read strictly, read with broken lines skipped, or followed while they are written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from goldilocks.errors import refuse, require

_RUN_NAME = re.compile(r"[A-Za-z0-9._-]+")

FULL = 64 << 20  # free bytes below which a failure is blamed on the disk
Object = dict[str, Any]


class _File:
    """A file of a run, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """``runs/<name>/`` and its files."""

    path: Path

    config = _File("config.yaml")  # the composed config that verl was given
    metrics = _File("metrics.jsonl")  # one JSON object per line: ``{"step": …, "data": {…}}``
    checkpoints = _File("checkpoints")  # verl's checkpoints, one folder each
    log = _File("log")  # everything that every process of the run printed
    reason = _File("reason")  # why the run failed, in one line, written by the driver; absent after a good end
    started_as = _File("started_as")  # the recipe, the task and the trainer
    lock = _File(".lock")  # held by the process that trains here, whose id it has
    secret = _File(".ray_token")  # the token by which the Ray processes of this run authenticate each other

    @classmethod
    def create(cls, root: Path, name: str) -> RunDir:
        """Make the directory; one that exists is that of an earlier start."""
        require(_RUN_NAME.fullmatch(name) is not None, "--name", name, "letters, digits, '.', '_' and '-'")
        run = cls((root / name).resolve())
        run.path.mkdir(parents=True, exist_ok=True)
        require(os.access(run.path, os.W_OK), "--runs", str(root), "a directory that can be written to")
        return run

    def begin(self, *, appends: bool) -> None:
        """Keep the logs of an earlier start under other names; the run resumes from its checkpoints.

        ``appends``: the trainer goes on with the metrics of earlier starts; else these are kept under another name too.
        """
        for file in (self.log, self.reason) if appends else (self.log, self.reason, self.metrics):
            set_aside(file)
        write_secret(self.secret)

    def full_disk(self) -> str | None:
        """Return a message if the disk is nearly full, else None; torch does not report a full disk itself."""
        free = shutil.disk_usage(self.path).free
        return f"the disk of {self.path} is full ({free >> 20} MiB left)" if free < FULL else None

    def failure(self, status: int | None) -> str:
        """Return why the driver ended with this status: its own reason if it could write one."""
        said = self.reason.read_text() if self.reason.exists() else ""
        return said or self.full_disk() or f"the driver ended with status {status}"


def cache_folder() -> Path:
    """Return the user's cache folder for what Goldilocks can make again: ``~/.cache/goldilocks`` on Linux."""
    return user_cache_path("goldilocks")


@contextlib.contextmanager
def held(lock: Path, option: str, named: str) -> Iterator[None]:
    """Hold what an option names by this file. Meanwhile another process that asks for it is refused."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            refuse(option, named, f"another {option}: process {file.read()} writes to it")
        except OSError:  # a file system without locks, as some clusters have: nobody can be asked
            pass
        file.truncate(0)
        file.write(f"{os.getpid()} on {platform.node()}")
        file.flush()
        yield


def set_aside(file: Path) -> None:
    """Rename a file of an earlier start of the run: ``metrics.jsonl`` becomes ``metrics.1.jsonl``, and so on."""
    if not file.exists():
        return
    earlier = (file.with_name(f"{file.stem}.{number}{file.suffix}") for number in range(1, 1 << 20))
    file.rename(next(path for path in earlier if not path.exists()))


def write_secret(path: Path) -> None:
    """Write a new token that this user alone can read."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it takes the place of ``path`` when the block ends, and is removed if it fails.

    The folder is made if it is not there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
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
    """The objects that were appended to a file since the last call of ``new``; at first, since this was made.

    Another file that takes the place of the first is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        there = path.stat() if path.exists() else None
        self._inode, self._offset = (there.st_ino, there.st_size) if there else (0, 0)

    def new(self) -> Iterator[Object]:
        """Yield the new objects. A line without its end is left for the next call, and a broken line is skipped."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
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
