"""Two runs, made once: nothing in these tests writes to them."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.lab.report.run_directories import write_run


@pytest.fixture(scope="session")
def dapo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "dapo", "dapo")


@pytest.fixture(scope="session")
def pilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "pilot", "pilot", steps=16)
