"""``goldilocks compare`` for real: two small arms on Ray, interrupted in the second and gone on with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from goldilocks.tasks.arithmetic import Arithmetic
from goldilocks.tasks.base import write_split
from goldilocks.tasks.tiny_model import make
from goldilocks.verl import defaults
from goldilocks.verl.supervisor import MARK

pytestmark = pytest.mark.integration

SMALL = [
    "data.train_batch_size=8",
    "data.val_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "algorithm.filter_groups.max_num_gen_batches=3",
    "algorithm.filter_groups.on_exhausted=backfill",
]
BUDGET = 48  # of rollouts: grpo makes 32 an update, so its second one is the last


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The default task, small and hardly taught."""
    root = tmp_path_factory.mktemp("arithmetic")
    task = Arithmetic()
    write_split(root / "data", task.data_source, "train", task.problems("train", 64, 0))
    write_split(root / "data", task.data_source, "val", task.problems("val", 16, 0))
    make(root / "model", steps=100)
    return {**os.environ, defaults.VARIABLE: str(root), "HF_HUB_OFFLINE": "1"}


def start(environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "goldilocks.cli", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def compare(out: Path) -> list[str]:
    return ["compare", "grpo", "dapo", "--budget", f"rollouts={BUDGET}", "--seeds", "1", "--out", str(out), *SMALL]


def processes_of(run: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(run.resolve()):
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def wait_for_ray(run: Path, process: subprocess.Popen[str], within: float) -> None:
    deadline = time.monotonic() + within
    while not any("raylet" in line for line in processes_of(run)):
        assert time.monotonic() < deadline, f"{run.name} did not start"
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)


def log(run: Path) -> str:
    return (run / "log").read_text(errors="replace")[-4000:] if (run / "log").exists() else "no log"


def updates(run: Path) -> list[tuple[int, float]]:
    """(step, rollouts generated so far) of every update."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    key = "accounts/generated_rollouts"
    return [(record["step"], record["data"][key]) for record in records if key in record["data"]]


def test_interrupted_in_the_second_arm_it_goes_on_and_comes_to_its_table(environment, tmp_path):
    out = tmp_path / "study"
    first, second = out / "grpo-seed1", out / "dapo-seed1"

    process = start(environment, *compare(out))
    wait_for_ray(second, process, within=240)
    process.send_signal(signal.SIGINT)
    printed, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "1 of 2 arms are done; the same command goes on" in error
    assert processes_of(first) + processes_of(second) == []
    assert "arm 1/2 grpo-seed1" in printed
    result, trained = (first / "result.json").read_text(), (first / "metrics.jsonl").stat().st_mtime_ns
    assert not (second / "result.json").exists()
    assert updates(first) == [(1, 32), (2, 64)], "the budget ends it"

    process = start(environment, *compare(out))
    printed, error = process.communicate(timeout=300)
    assert process.returncode == 0, error + log(second)
    assert "arm 1/2" not in printed
    assert "arm 2/2 dapo-seed1" in printed
    assert "at 48 rollouts each, 1 seed" in printed
    assert ((first / "result.json").read_text(), (first / "metrics.jsonl").stat().st_mtime_ns) == (result, trained)
    assert (out / "report.html").exists()
    table = (out / "table.json").read_text()
    rows = json.loads(table)["rows"]
    assert [row["recipe"] for row in rows] == ["grpo", "dapo"]
    assert rows[0]["updates"]["mean"] == 2
    assert rows[0]["rollouts"]["mean"] == 64
    assert [len(json.loads((run / "result.json").read_text())["validations"]) for run in (first,)] == [3]

    process = start(environment, *compare(out))
    printed, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert (out / "table.json").read_text() == table, "the table is a function of the results"

    goes_on(environment, first, tmp_path)


def goes_on(environment: dict[str, str], run: Path, runs: Path) -> None:
    """A run that had spent its budget is given more: it goes on from its checkpoint, and what it had spent counts."""
    shutil.copytree(run / "checkpoints", runs / "more" / "checkpoints")
    process = start(environment, "train", "grpo", "--runs", str(runs), "--name", "more", *SMALL,
                    "goldilocks.budget.rollouts=100", "trainer.total_training_steps=1000")  # fmt: skip
    printed, error = process.communicate(timeout=240)
    assert process.returncode == 0, error + log(runs / "more")
    assert updates(runs / "more") == [(3, 96), (4, 128)]
    assert "128% of the budget" in printed
