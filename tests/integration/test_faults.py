"""The campaigns of ``make faults`` in their short form: killed twice, and nothing is lost or made twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .conftest import end, start

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.runs(3)]

SCRIPT = Path(__file__).parents[2] / "scripts" / "faults.py"


@pytest.mark.parametrize(
    "options",
    [["--seed", "205"], ["--trainer", "trl", "--seed", "8", "--within", "5"]],
    ids=["verl, as it starts and while it trains", "TRL, while it trains and while it saves"],
)
def test_a_run_that_is_killed_twice_trains_no_group_twice_and_loses_none(
    options: list[str], arithmetic: Path, tmp_path: Path
) -> None:
    words = [sys.executable, str(SCRIPT), "--kills", "2", *options, "--out", str(tmp_path)]
    status, said = end(start(*words, GOLDILOCKS_TASK=str(arithmetic)))
    assert status == 0, said
    for check in ("groups trained twice", "kept groups lost", "accounts that do not go on", "processes left running"):
        assert f"{check:<28} 0" in said
