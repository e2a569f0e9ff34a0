"""``trainer.v1.trainer_mode=goldilocks_async`` on two logical devices: one trains, the other never stops generating."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Launch, Run, Task, kill
from .test_partial import REWARD, untaught
from .test_trainer import FILTER, assert_accounts_sum, assert_full_of_signal, trained_groups

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def overrides(task: Task, folder: Path) -> list[str]:
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    return [
        "trainer.v1.trainer_mode=goldilocks_async",
        FILTER,
        "algorithm.filter_groups.metric=acc",
        "+algorithm.filter_groups.max_carry_steps=4",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=ray",
        "ray_kwargs.ray_init.num_gpus=2",
        f"actor_rollout_ref.model.path={untaught(task, folder / 'model')}",
        "data.gen_batch_size=16",
        "data.max_response_length=100",
        f"reward.custom_reward_function.path={reward}",
        "reward.custom_reward_function.name=by_hash",
        "trainer.save_freq=1",
        f"trainer.rollout_data_dir={folder}/rollouts",
    ]


def assert_trained(run: Run, dumps: Path, *steps: int) -> None:
    """Every step trained a full batch of its own, none of it too old, some of it written by older policies."""
    assert run.status == 0, run.tail()
    assert [step["step"] for step in run.steps] == list(steps)
    assert_accounts_sum(run)
    assert 0 < max(step["train/age_max"] for step in run.steps) <= 4
    assert any(step.get("train/stale_tokens", 0) > 0 for step in run.steps)
    trained = [uid for step in range(1, steps[-1] + 1) for uid in trained_groups(dumps, step)]
    assert len(trained) == len(set(trained))
    for step in steps:
        assert_full_of_signal(trained_groups(dumps, step))


def test_rollouts_go_on_while_the_trainer_trains_and_a_killed_run_goes_on_with_what_was_in_flight(
    launch: Launch, task: Task, tmp_path: Path
) -> None:
    settings = overrides(task, tmp_path)
    killed = launch(*settings, "trainer.total_training_steps=200", during=kill("TaskRunner"))
    assert killed.status != 0
    saved = int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    run = launch(*settings, f"trainer.total_training_steps={saved + 4}", "trainer.resume_mode=auto")
    assert "Goldilocks goes on from" in run.log
    assert_trained(run, tmp_path / "rollouts", *range(saved + 1, saved + 5))
