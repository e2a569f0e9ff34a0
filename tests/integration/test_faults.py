"""The campaigns of ``make faults`` in their short form: killed twice, and nothing is lost or made twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.runs(3)]

SCRIPT = Path(__file__).parents[2] / "scripts" / "faults.py"


@pytest.mark.parametrize(
    "options",
    [["--seed", "1"], ["--trainer", "trl", "--seed", "8", "--within", "5"]],
    ids=["verl", "TRL, while it trains and while it saves"],
)
def test_a_run_that_is_killed_twice_trains_no_group_twice_and_loses_none(
    options: list[str], arithmetic: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "2", *options, "--out", str(tmp_path)],
        env={**os.environ, "GOLDILOCKS_TASK": str(arithmetic), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for check in ("groups trained twice", "kept groups lost", "accounts that do not go on", "processes left running"):
        assert f"{check:<28} 0" in done.stdout
