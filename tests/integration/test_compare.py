"""``goldilocks compare`` for real, by the script of ``examples/``: two small arms, interrupted in the second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_files import json_lines

from .conftest import PATIENCE_S, SMALL, processes_of, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.runs(3)]

SCRIPT = Path(__file__).parents[2] / "examples/grpo_trainer/run_adaptive_vs_baseline_comparison.sh"
BUDGET = 48  # of rollouts: grpo makes 32 an update, so its second one is the last


def compare(arithmetic: Path, out: Path) -> subprocess.Popen[str]:
    """The comparison of ``examples/``, in its tiny form."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    chosen = {"MODEL": "tiny", "BUDGET": f"rollouts={BUDGET}", "GOLDILOCKS_TASK": str(arithmetic), "PATH": path}
    return subprocess.Popen(
        ["bash", str(SCRIPT), "both", "--seeds", "1", "--out", str(out), "adaptive_rollout.max_n=8", *SMALL],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **chosen},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def log(run: Path) -> str:
    return (run / "log").read_text(errors="replace")[-4000:] if (run / "log").exists() else "no log"


def updates(run: Path) -> list[tuple[int, float]]:
    """(step, rollouts generated so far) of every update."""
    records = json_lines(run / "metrics.jsonl")
    key = "accounts/generated_rollouts"
    return [(record["step"], record["data"][key]) for record in records if key in record["data"]]


@pytest.mark.slow
def test_interrupted_in_the_second_arm_it_goes_on_and_comes_to_its_table(arithmetic, tmp_path):
    out = tmp_path / "study"
    first, second = out / "grpo-seed1", out / "adaptive-seed1"

    process = compare(arithmetic, out)
    wait_for(second, "raylet", process)
    process.send_signal(signal.SIGINT)
    printed, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, error
    assert "1 of 2 arms are done; the same command goes on" in error
    assert processes_of(first) + processes_of(second) == []
    assert "arm 1/2 grpo-seed1" in printed
    result, trained = (first / "result.json").read_text(), (first / "metrics.jsonl").stat().st_mtime_ns
    assert not (second / "result.json").exists()
    assert updates(first) == [(1, 32), (2, 64)], "the budget ends it"

    process = compare(arithmetic, out)
    printed, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, error + log(second)
    assert "arm 1/2" not in printed
    assert "arm 2/2 adaptive-seed1" in printed
    assert "at 48 rollouts each, 1 seed" in printed
    assert ((first / "result.json").read_text(), (first / "metrics.jsonl").stat().st_mtime_ns) == (result, trained)
    assert (out / "report.html").exists()
    table = (out / "table.json").read_text()
    rows = json.loads(table)["rows"]
    assert [row["recipe"] for row in rows] == ["grpo", "adaptive"]
    assert rows[0]["updates"]["mean"] == 2
    assert rows[0]["rollouts"]["mean"] == 64
    assert len(json.loads(result)["validations"]) == 3
    assert all(row["rollouts"]["mean"] >= BUDGET for row in rows)

    process = compare(arithmetic, out)
    printed, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, error
    assert (out / "table.json").read_text() == table, "the table is a function of the results"
