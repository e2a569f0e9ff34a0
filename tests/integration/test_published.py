"""``task=gsm8k_small`` and ``task=math``, from their files to the last validation, with a tiny model as the real one.

Its answers are random, so the rewards of these runs are coins: groups whose rewards differ are there in any case.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from published_world import gsm8k_files, math_files, small_model
from run_files import logged

from .conftest import PATIENCE_S, SMALL

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SHORT = ["data.max_response_length=16", "actor_rollout_ref.rollout.dtype=float32", *SMALL]
COINS = ["reward.custom_reward_function.name=random_score", "algorithm.filter_groups.metric=score"]


def goldilocks(folder: Path, *words: str) -> str:
    """Run the command with an empty cache; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "goldilocks.cli", *words],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    logs = [file.read_text(errors="replace")[-4000:] for file in folder.glob("**/log")]
    assert done.returncode == 0, "\n".join([done.stderr, *logs])
    return done.stdout + done.stderr


def test_gsm8k_is_taught_then_trained_on_its_other_half(tmp_path: Path) -> None:
    words = [gsm8k_files(tmp_path / "gsm8k", 64), small_model(tmp_path / "model"), *SHORT, *COINS]
    lessons = ["task.warm_start.steps=3", "task.warm_start.batch=4", "trainer.total_training_steps=2"]
    where = ["--runs", str(tmp_path), "--name", "run"]
    said = goldilocks(tmp_path, "train", "frontier", "task=gsm8k_small", *words, *lessons, *where)
    assert "model has had 3 × 4 lessons" in said
    records = logged(tmp_path / "run")
    steps = [record for record in records if "actor/grad_norm" in record]
    assert [step["train/informative_groups"] for step in steps] == [8, 8]
    assert all(step["accounts/reward_calls"] > 0 for step in steps)
    assert all(step.get("accounts/reward_failures", 0) == 0 for step in steps)
    accuracies = [
        value for record in records for key, value in record.items() if key.endswith("openai/gsm8k/acc/mean@1")
    ]
    assert len(accuracies) >= 2
    assert any("/difficulty/" in key for record in records for key in record), "accuracy by steps of the solution"


@pytest.mark.runs(4)
def test_a_study_on_math_has_its_arms_two_at_a_time_and_runs_none_twice(tmp_path: Path) -> None:
    (tmp_path / "coins.yaml").write_text(
        "defaults: [grpo, _self_]\nreward: {custom_reward_function: {name: random_score}}\n"
    )
    words = [math_files(tmp_path / "math"), small_model(tmp_path / "model"), *SHORT, "trainer=trl", "device=cpu"]
    recipes = ["grpo", str(tmp_path / "coins.yaml")]
    options = ["--budget", "rollouts=64", "--seeds", "2", "--parallel", "2", "--out", str(tmp_path / "study")]
    said = goldilocks(tmp_path, "compare", *recipes, "task=math", *words, *options)
    assert "arm 4/4 coins-seed2" in said
    assert "accuracy by level" in said
    trained = {file: file.stat().st_mtime_ns for file in tmp_path.glob("study/*/metrics.jsonl")}
    assert len(trained) == 4
    for file in trained:
        (record,) = [one for one in logged(file.parent) if "val/level/1/acc" in one][:1]
        assert record["val/type/algebra/acc"] == 0.0

    shutil.rmtree(tmp_path / "math")  # a study that has ended is shown where its data and model are not
    again = goldilocks(tmp_path, "compare", *recipes, "task=math", *words, *options)
    assert "arm 1/4" not in again
    assert {file: file.stat().st_mtime_ns for file in trained} == trained
