"""``goldilocks compare`` for real, by the script of ``examples/``: two small arms, interrupted in the second."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from documented_metrics import undocumented
from run_files import batches_of, json_lines, logged

from .conftest import PATIENCE_S, SMALL, processes_of, start, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.runs(3)]

SCRIPT = Path(__file__).parents[2] / "examples/grpo_trainer/run_adaptive_vs_baseline_comparison.sh"
BUDGET = 48  # of rollouts: grpo makes 32 an update, so its second one is the last


def compare(arithmetic: Path, out: Path) -> subprocess.Popen[str]:
    """The comparison of ``examples/``, in its tiny form."""
    chosen = {"MODEL": "tiny", "BUDGET": f"rollouts={BUDGET}", "GOLDILOCKS_TASK": str(arithmetic)}
    words = ["both", "--seeds", "1", "--out", str(out), "adaptive_rollout.max_n=8", *SMALL]
    return start("bash", str(SCRIPT), *words, **chosen)


def log(run: Path) -> str:
    return (run / "log").read_text(errors="replace")[-4000:] if (run / "log").exists() else "no log"


def updates(run: Path) -> list[tuple[int, float]]:
    """(step, rollouts generated so far) of every update."""
    records = json_lines(run / "metrics.jsonl")
    key = "accounts/generated_rollouts"
    return [(record["step"], record["data"][key]) for record in records if key in record["data"]]


def check_arm(run: Path, *sizes: int) -> None:
    """Every update trained eight groups: of these sizes, or two answers of which one is right, or eight."""
    batches, records = batches_of(run), logged(run)
    steps = [record for record in records if "accounts/trained_rollouts" in record]
    assert len(batches) == len(steps) > 0
    trained = 0
    for groups, step in zip(batches, steps, strict=True):
        scores = [[row["score"] for row in rows] for rows in groups.values()]
        assert len(scores) == 8
        assert (
            [*map(len, scores)] == [*sizes]
            if sizes
            else all(len(one) == (2 if max(one[:2]) == 1 else 8) for one in scores)
        )
        trained += sum(map(len, scores))
        assert step["accounts/trained_rollouts"] == trained
        assert step["accounts/filtered_rollouts"] == 0
        if not sizes:
            assert step["adaptive_rollout/min_rollouts_per_sample"] == min(map(len, scores))
            assert step["adaptive_rollout/max_rollouts_per_sample"] == max(map(len, scores))
    assert [name for record in records for name in undocumented(record)] == []


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
    check_arm(first, *[4] * 8)
    check_arm(second)

    process = compare(arithmetic, out)
    printed, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, error
    assert (out / "table.json").read_text() == table, "the table is a function of the results"
