"""Why a run ended, in one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from goldilocks.launch.train import explain
from goldilocks.runs.files import RunDir


def test_what_was_written_for_the_user_is_said_as_it_is(tmp_path: Path) -> None:
    assert explain(ValueError("data.seed='x' is not accepted:\n a number"), RunDir(tmp_path)) == (
        "data.seed='x' is not accepted: a number"
    )


def test_any_other_error_has_its_type_and_its_place(tmp_path: Path) -> None:
    try:
        raise LookupError("no such answer")
    except LookupError as error:
        said = explain(error, RunDir(tmp_path))
    assert said.startswith("LookupError: no such answer")
    assert "test_driver.py" in said


def test_a_full_disk_is_said_whatever_torch_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 20))
    said = explain(RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos"), RunDir(tmp_path))
    assert said.startswith(f"the disk of {tmp_path} is full (3 MiB left): RuntimeError: [enforce fail")


def test_the_disk_is_said_to_be_full_also_where_the_driver_had_no_room_to_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    assert run.failure(9) == "the driver ended with status 9"
    run.reason.write_text("")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert run.failure(1) == f"the disk of {tmp_path} is full (0 MiB left)"
    run.reason.write_text("data.seed='x' is not accepted")
    assert run.failure(1) == "data.seed='x' is not accepted"
