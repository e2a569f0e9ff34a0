"""``on_full: partial`` on the real trainer: answers of all lengths stop when the batch is full and go on after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from goldilocks.verl.store import load_rows

from .conftest import Launch, Task
from .killed import assert_none_twice, dumped_every_step, killed, trained_groups
from .test_trainer import FILTER, MODE, assert_accounts_sum, assert_full_of_signal

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.runs(2)]

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


def of_all_lengths(task: Task, tmp_path: Path) -> list[str]:
    """The settings of a run whose rollouts pause: answers of all lengths, half of them right."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    return [
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
        *dumped_every_step(tmp_path),
    ]


def test_rollouts_pause_go_on_survive_a_kill_and_are_trained_against_what_wrote_them(
    launch: Launch, task: Task, tmp_path: Path
) -> None:
    overrides = of_all_lengths(task, tmp_path)
    before = killed(launch, tmp_path, *overrides)
    saved = before.saved
    unfinished = unfinished_rows(tmp_path / "checkpoints" / f"global_step_{saved}")
    run = launch(*overrides, f"trainer.total_training_steps={saved + 4}", "trainer.resume_mode=auto")
    assert run.status == 0, run.tail()
    assert (f", {len(unfinished)} rollouts go on from what they had written" in run.log) == bool(unfinished)
    assert [step["step"] for step in run.steps] == [*range(saved + 1, saved + 5)]
    assert_accounts_sum(run)
    for step in (*before.run.steps, *run.steps):
        assert step["train/age_max"] <= 4
        assert step["train/groups_expired"] == 0
    # A step may find its whole batch written while the one before was judged: then nothing goes on in it.
    for name in ("train/rollouts_paused", "accounts/paused_tokens", "train/age_max"):
        assert max(step[name] for step in run.steps) > 0
    assert any(0 < step.get("train/stale_tokens", 0) < step["response_length/mean"] * 32 for step in run.steps)
    after = [trained_groups(tmp_path / "rollouts", step) for step in range(saved + 1, saved + 5)]
    assert_none_twice(*before.trained.values(), *after)
    for groups in after:
        assert_full_of_signal(groups)


def unfinished_rows(checkpoint: Path) -> list[Any]:
    """Every rollout that was unfinished and had been answered something."""
    return [row for folder in checkpoint.rglob("unfinished") for row in load_rows(folder)]
