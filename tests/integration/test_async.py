"""``trainer.v1.trainer_mode=goldilocks_async`` on two logical devices: one trains, the other never stops generating."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Launch, Task
from .killed import assert_none_twice, dumped_every_step, killed, trained_groups
from .test_partial import REWARD, untaught
from .test_trainer import FILTER, assert_accounts_sum, assert_full_of_signal

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.runs(2)]


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
        *dumped_every_step(folder),
    ]


def test_rollouts_go_on_while_the_trainer_trains_and_a_killed_run_goes_on_with_what_was_in_flight(
    launch: Launch, task: Task, tmp_path: Path
) -> None:
    settings = overrides(task, tmp_path)
    before = killed(launch, tmp_path, *settings)
    steps = range(before.saved + 1, before.saved + 5)
    run = launch(*settings, f"trainer.total_training_steps={steps[-1]}", "trainer.resume_mode=auto")
    assert run.status == 0, run.tail()
    assert "Goldilocks goes on from" in run.log
    assert [step["step"] for step in run.steps] == list(steps)
    assert_accounts_sum(run)
    assert 0 < max(step["train/age_max"] for step in run.steps) <= 4
    assert any(step.get("train/stale_tokens", 0) > 0 for step in run.steps)
    after = [trained_groups(tmp_path / "rollouts", step) for step in steps]
    assert_none_twice(*before.trained.values(), *after)
    for groups in (*before.trained.values(), *after):
        assert_full_of_signal(groups)
