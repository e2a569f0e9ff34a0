"""``goldilocks train … rollout.name=vllm`` for real, on a machine without a GPU; ``make test-vllm`` runs it."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2400)]

SMALL = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.max_num_seqs=8",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
)
CANCELLING = Path(__file__).parents[2] / "benchmarks" / "cancelling.py"

Train = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """``train(*words)`` starts the command; its run is ``tmp_path/test``."""

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "goldilocks.cli", "train", "--runs", str(tmp_path), "--name", "test"]
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen([*command, *SMALL, *words], env=env, text=True, stderr=subprocess.PIPE)

    return start


def steps(run: Path) -> dict[int, dict[str, float]]:
    """What the run has logged so far, by step."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {record["step"]: record["data"] for record in map(json.loads, lines) if record["step"] > 0}


def test_dapo_trains_and_what_gate_2_rejects_is_refilled(train: Train, tmp_path: Path) -> None:
    gates = (
        "batch_filter.enable=true",
        "batch_filter.enable_two_gate_filter=true",
        "batch_filter.gate_always=true",
        "batch_filter.gate2_instability_threshold=-2.3",  # no token less than a tenth as likely as the best
    )
    # Without carried groups every row is of the newest policy: new weights that did not arrive would show.
    small = ("trainer.total_training_steps=3", "actor_rollout_ref.rollout.n=4")
    process = train("dapo", *small, "algorithm.filter_groups.max_carry_steps=0", *gates)
    _, err = process.communicate()
    assert process.returncode == 0, err
    logged = steps(tmp_path / "test")
    assert sorted(logged) == [1, 2, 3]
    assert logged[3]["accounts/rejected_rollouts"] > 0
    for step in logged.values():
        assert step["filter/gate2_missing_tensors"] == 0
        assert step["train/informative_groups"] == 4
        assert step["training/rollout_probs_diff_max"] < 1e-5


def test_adaptive_cancels_inside_the_engine_and_a_killed_run_goes_on(train: Train, tmp_path: Path) -> None:
    script = runpy.run_path(str(CANCELLING))
    words = (*script["words"]("vllm", 3, tmp_path), "trainer.save_freq=1")
    process = train(*words)
    while process.poll() is None and not (tmp_path / "test/checkpoints/latest_checkpointed_iteration.txt").exists():
        time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resumed = train(*words)
    _, err = resumed.communicate()
    assert resumed.returncode == 0, err
    after = steps(tmp_path / "test")
    assert min(after) > 1
    assert max(after) == 3
    last = after[3]
    assert last["aborts/asked"] > 0
    assert last["aborts/ended"] > last["aborts/asked"] / 2
    assert all(step["aborts/left"] == 0 for step in after.values())
    assert last["aborts/tokens"] < script["TOKENS"] * last["aborts/ended"]
