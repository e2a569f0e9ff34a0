"""The directory of a run. Files of an earlier start are kept, under other names."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

_NAME = re.compile(r"[A-Za-z0-9._-]+")

FULL = 64 << 20  # free bytes below which a failure is blamed on the disk


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
    secret = _File(".ray_token")  # the token by which the Ray processes of this run authenticate each other

    @classmethod
    def create(cls, root: Path, name: str) -> RunDir:
        """Make the directory. If it exists, the run resumes from its checkpoints, and old logs and metrics are kept."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"--name={name!r} is not accepted: letters, digits, '.', '_' and '-'")
        run = cls((root / name).resolve())
        run.path.mkdir(parents=True, exist_ok=True)
        if not os.access(run.path, os.W_OK):
            raise ValueError(f"--runs={str(root)!r} is not accepted: a directory that can be written to")
        for file in (run.log, run.metrics, run.reason):
            set_aside(file)
        run._write_secret()
        return run

    def full_disk(self) -> str | None:
        """Return a message if the disk is nearly full, else None; torch does not report a full disk itself."""
        free = shutil.disk_usage(self.path).free
        return f"the disk of {self.path} is full ({free >> 20} MiB left)" if free < FULL else None

    def failure(self, status: int | None) -> str:
        """Return why the driver ended with this status: its own reason if it could write one."""
        said = self.reason.read_text() if self.reason.exists() else ""
        return said or self.full_disk() or f"the driver ended with status {status}"

    def _write_secret(self) -> None:
        self.secret.unlink(missing_ok=True)
        self.secret.touch(mode=0o600)
        self.secret.write_text(secrets.token_hex(32))


def cache_folder() -> Path:
    """Return the user's cache folder for what Goldilocks can make again: ``~/.cache/goldilocks`` on Linux."""
    return user_cache_path("goldilocks")


def set_aside(file: Path) -> None:
    """Rename a file of an earlier start of the run: ``metrics.jsonl`` becomes ``metrics.1.jsonl``, and so on."""
    if not file.exists():
        return
    earlier = (file.with_name(f"{file.stem}.{number}{file.suffix}") for number in range(1, 1 << 20))
    file.rename(next(path for path in earlier if not path.exists()))
