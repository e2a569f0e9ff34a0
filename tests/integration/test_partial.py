"""``on_full: partial`` on the real trainer: answers of all lengths stop when the batch is full and go on after it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .conftest import Launch, Task, kill
from .test_trainer import FILTER, MODE, assert_accounts_sum, assert_full_of_signal, trained_groups

pytestmark = [pytest.mark.integration, pytest.mark.slow]

REWARD = '''
import zlib

def by_hash(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Half of all answers are right, whatever their length."""
    acc = float(zlib.crc32(solution_str.encode()) & 1)
    return {"score": acc, "acc": acc}
'''


def untaught(task: Task, folder: Path) -> Path:
    """A model that ends an answer with probability 1/32 at each token."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(task.model)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(task.model).save_pretrained(folder)
    return folder


def test_rollouts_pause_go_on_survive_a_kill_and_are_trained_against_what_wrote_them(
    launch: Launch, task: Task, tmp_path: Path
) -> None:
    reward, dumps = tmp_path / "reward.py", tmp_path / "rollouts"
    reward.write_text(REWARD)
    overrides = [
        MODE,
        FILTER,
        "algorithm.filter_groups.metric=acc",
        "+algorithm.filter_groups.on_full=partial",
        "+algorithm.filter_groups.max_carry_steps=4",
        f"actor_rollout_ref.model.path={untaught(task, tmp_path / 'model')}",
        "data.gen_batch_size=12",
        "data.max_response_length=100",
        f"reward.custom_reward_function.path={reward}",
        "reward.custom_reward_function.name=by_hash",
        "trainer.save_freq=1",
        f"trainer.rollout_data_dir={dumps}",
    ]
    killed = launch(*overrides, "trainer.total_training_steps=200", during=kill("TaskRunner"))
    assert killed.status != 0
    saved = int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    before = {uid for step in range(1, saved + 1) for uid in trained_groups(dumps, step)}
    run = launch(*overrides, f"trainer.total_training_steps={saved + 4}", "trainer.resume_mode=auto")
    assert run.status == 0, run.tail()
    assert "rollouts go on from what they had written" in run.log
    assert [step["step"] for step in run.steps] == [*range(saved + 1, saved + 5)]
    assert_accounts_sum(run)
    for step in (*killed.steps, *run.steps):
        assert step["train/rollouts_paused"] > 0
        assert step["accounts/paused_tokens"] > 0
        assert step["train/age_max"] <= 4
        assert step["train/groups_expired"] == 0
    assert max(step["train/age_max"] for step in run.steps) > 0
    assert any(0 < step["train/stale_tokens"] < step["response_length/mean"] * 32 for step in run.steps)
    after = [uid for step in range(saved + 1, saved + 5) for uid in trained_groups(dumps, step)]
    assert len({*before, *after}) == len(before) + len(after)  # no group is trained twice
    for step in range(saved + 1, saved + 5):
        assert_full_of_signal(trained_groups(dumps, step))
