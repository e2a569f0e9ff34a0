"""``trainer.v1.trainer_mode=goldilocks_async`` on two logical devices: one trains, the other never stops generating."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Launch, Task, kill
from .test_partial import REWARD, untaught
from .test_trainer import FILTER, assert_accounts_sum, assert_full_of_signal, trained_groups

pytestmark = pytest.mark.integration


def test_rollouts_go_on_while_the_trainer_trains_and_a_killed_run_goes_on(
    launch: Launch, task: Task, tmp_path: Path
) -> None:
    reward, dumps = tmp_path / "reward.py", tmp_path / "rollouts"
    reward.write_text(REWARD)
    overrides = [
        "trainer.v1.trainer_mode=goldilocks_async",
        FILTER,
        "algorithm.filter_groups.metric=acc",
        "+algorithm.filter_groups.max_carry_steps=4",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=ray",
        "ray_kwargs.ray_init.num_gpus=2",
        f"actor_rollout_ref.model.path={untaught(task, tmp_path / 'model')}",
        "data.gen_batch_size=16",
        "data.max_response_length=100",
        f"reward.custom_reward_function.path={reward}",
        "reward.custom_reward_function.name=by_hash",
        "trainer.save_freq=1",
        f"trainer.rollout_data_dir={dumps}",
    ]
    killed = launch(*overrides, "trainer.total_training_steps=200", during=kill("TaskRunner"))
    assert killed.status != 0
    saved = int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    run = launch(*overrides, f"trainer.total_training_steps={saved + 4}", "trainer.resume_mode=auto")
    assert run.status == 0, run.tail()
    assert "Goldilocks goes on from" in run.log
    assert [step["step"] for step in run.steps] == [*range(saved + 1, saved + 5)]
    assert_accounts_sum(run)
    assert all(step["train/age_max"] <= 4 for step in run.steps)
    assert max(step["train/age_max"] for step in run.steps) > 0
    assert any(step["train/stale_tokens"] > 0 for step in run.steps if "train/stale_tokens" in step)
    trained = [uid for step in range(1, saved + 5) for uid in trained_groups(dumps, step)]
    assert len(trained) == len(set(trained))
    for step in range(saved + 1, saved + 5):
        assert_full_of_signal(trained_groups(dumps, step))
