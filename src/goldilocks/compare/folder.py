"""A study on disk: ``study.json``, a run directory for each arm, and in it ``result.json`` once the arm has ended.

Invariants: a result is whole or not there; what is in the folder belongs to one study; one process works in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from goldilocks.compare.arm import Arm
from goldilocks.compare.result import Result
from goldilocks.compare.study import GRID, Study
from goldilocks.runs.atomic import write_text


class StudyFolder:
    """``with StudyFolder.open(path, study) as folder: …``"""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, study: Study) -> Iterator[StudyFolder]:
        """Begin or continue the study here. A folder of another study, or one in use, is an error."""
        path.mkdir(parents=True, exist_ok=True)
        with (path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"--out={str(path)!r}: another goldilocks compare is running there") from None
            folder = cls(path)
            folder._claim(study)
            yield folder

    def _claim(self, study: Study) -> None:
        file, settings = self.path / "study.json", study.as_dict()
        if not file.exists():
            write_json(file, settings)
        known = {"tune_order": GRID, **json.loads(file.read_text())}  # which older studies do not name
        differing = [key for key in settings if known.get(key) != settings[key]]
        if differing:
            said = "; ".join(
                f"{key} is {json.dumps(known.get(key))}, not {json.dumps(settings[key])}" for key in differing
            )
            raise ValueError(f"--out={str(self.path)!r} has another study: {said}. Choose another --out")

    def run(self, arm: Arm) -> Path:
        """Return the arm's run directory."""
        return self.path / arm.name

    def result(self, arm: Arm) -> Result | None:
        """Return the arm's result, or None if the arm has not ended."""
        file = self.run(arm) / "result.json"
        return Result.from_dict(json.loads(file.read_text())) if file.exists() else None

    def clear(self, arm: Arm) -> None:
        """Delete an unfinished arm: it starts again from its beginning."""
        if self.run(arm).exists():
            shutil.rmtree(self.run(arm))

    def finish(self, arm: Arm, result: Result) -> None:
        """Write the result of an arm that has ended."""
        self.run(arm).mkdir(parents=True, exist_ok=True)
        write_json(self.run(arm) / "result.json", result.as_dict())


def write_json(file: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all."""
    write_text(file, json.dumps(value, indent=2) + "\n")
