"""``task=gsm8k_small`` and ``task=math``, from their files to the last validation, with a tiny model as the real one.

Its answers are random, so the rewards of these runs are coins: groups whose rewards differ are there in any case. The
last test has a real language model, if it can be had on this machine.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from published_world import gsm8k_files, math_files, small_model
from run_files import logged

from goldilocks.tasks.download import download

from .conftest import GOLDILOCKS, SMALL, end, start

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SHORT = ["data.max_response_length=16", "actor_rollout_ref.rollout.dtype=float32", *SMALL]
COINS = ["reward.custom_reward_function.name=random_score", "algorithm.filter_groups.metric=score"]


def goldilocks(folder: Path, *words: str) -> str:
    """Run the command with an empty cache; return what it printed."""
    status, said = end(start(*GOLDILOCKS, *words, XDG_CACHE_HOME=str(folder / "cache")), folder)
    assert status == 0, said
    return said


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


@pytest.mark.runs(2)
def test_a_study_on_math_has_its_arms_two_at_a_time_and_runs_none_twice(tmp_path: Path) -> None:
    (tmp_path / "coins.yaml").write_text(
        "defaults: [grpo, _self_]\nreward: {custom_reward_function: {name: random_score}}\n"
    )
    words = [math_files(tmp_path / "math"), small_model(tmp_path / "model"), *SHORT, "trainer=trl", "device=cpu"]
    recipes = ["grpo", str(tmp_path / "coins.yaml")]
    options = ["--budget", "rollouts=64", "--seeds", "1", "--parallel", "2", "--out", str(tmp_path / "study")]
    said = goldilocks(tmp_path, "compare", *recipes, "task=math", *words, *options)
    assert "arm 2/2 coins-seed1" in said
    assert "accuracy by level" in said
    trained = {file: file.stat().st_mtime_ns for file in tmp_path.glob("study/*/metrics.jsonl")}
    assert len(trained) == 2
    for file in trained:
        (record,) = [one for one in logged(file.parent) if "val/level/1/acc" in one][:1]
        assert record["val/type/algebra/acc"] == 0.0

    shutil.rmtree(tmp_path / "math")  # a study that has ended is shown where its data and model are not
    again = goldilocks(tmp_path, "compare", *recipes, "task=math", *words, *options)
    assert "arm 1/2" not in again
    assert {file: file.stat().st_mtime_ns for file in trained} == trained


def test_a_step_of_dapo_trains_groups_of_a_real_model_whose_answers_differ(tmp_path: Path) -> None:
    try:
        model = download("smollm2")  # in the user's cache, fetched if it is not there
    except (ValueError, OSError) as error:
        pytest.skip(str(error))
    words = [f"actor_rollout_ref.model.path={model}", "data.train_batch_size=2", "actor_rollout_ref.rollout.n=4"]
    words += [
        f"trainer.{key}" for key in ("total_training_steps=1", "val_before_train=False", "test_freq=-1", "save_freq=-1")
    ]
    goldilocks(tmp_path, "train", "dapo", "task=sums_small", *words, "--runs", str(tmp_path), "--name", "run")
    (step,) = [record for record in logged(tmp_path / "run") if "actor/grad_norm" in record]
    assert step["train/informative_groups"] == 2
    assert 0 < step["actor/grad_norm"] < 1e3
    assert step["response_length/mean"] > 1
    # In fp32 on one machine the engine and the trainer agree on every token's probability.
    assert step["training/rollout_probs_diff_max"] < 1e-3
