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

FULL = 64 << 20  # bytes free below which a failure is put down to the disk


@dataclass(frozen=True)
class RunDir:
    """``runs/<name>/``."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str) -> RunDir:
        """Make the directory. If it exists, the run resumes from its checkpoints, and old logs and metrics are kept."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"--name={name!r}: letters, digits, '.', '_' and '-' only")
        run = cls((root / name).resolve())
        run.path.mkdir(parents=True, exist_ok=True)
        if not os.access(run.path, os.W_OK):
            raise ValueError(f"{run.path} cannot be written to; choose another with --runs DIR")
        for file in (run.log, run.metrics, run.reason):
            set_aside(file)
        run._write_secret()
        return run

    @property
    def config(self) -> Path:
        """The composed config that verl was given."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per line: ``{"step": …, "data": {…}}``."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """verl's checkpoints, one folder each."""
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        """Everything that every process of the run printed."""
        return self.path / "log"

    @property
    def reason(self) -> Path:
        """Why the run failed, in one line; written by the driver, absent after a good end."""
        return self.path / "reason"

    @property
    def secret(self) -> Path:
        """The token by which the Ray processes of this run authenticate each other."""
        return self.path / ".ray_token"

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
