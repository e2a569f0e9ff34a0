"""A real language model is trained with dynamic sampling, if it can be had on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_files import logged

from goldilocks.tasks.download import download

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROMPTS = 2


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The model's folder in the user's cache, fetched if it is not there."""
    try:
        return download("smollm2")
    except (ValueError, OSError) as error:
        pytest.skip(str(error))


def test_two_steps_of_dapo_train_groups_whose_answers_differ(smollm2: Path, tmp_path: Path) -> None:
    words = [
        "dapo",
        "task=sums_small",
        f"actor_rollout_ref.model.path={smollm2}",
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]
    command = [sys.executable, "-m", "goldilocks.cli", "train", *words, "--runs", str(tmp_path), "--name", "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    log = tmp_path / "run" / "log"
    assert done.returncode == 0, done.stderr + (log.read_text(errors="replace")[-4000:] if log.exists() else "")
    records = logged(tmp_path / "run")
    steps = [record for record in records if "actor/grad_norm" in record]
    assert len(steps) == 2
    for step in steps:
        assert step["train/informative_groups"] == PROMPTS
        assert 0 < step["actor/grad_norm"] < 1e3
        assert step["response_length/mean"] > 1
    # In fp32 on one machine the engine and the trainer agree on every token's probability.
    assert steps[0]["training/rollout_probs_diff_max"] < 1e-3
