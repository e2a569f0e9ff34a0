"""``trainer.v1.trainer_mode=goldilocks_async`` on two logical devices: one trains, the other never stops generating.

The same launch has a tool and an adapter: verl 0.9.1 would send the servers the base model alone (verl#7495).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from run_files import json_lines

from .agent import answered, with_agent
from .conftest import Launch, Task
from .killed import assert_none_twice, killed, trained_groups
from .paused import of_all_lengths
from .test_agents import LORA
from .test_trainer import assert_accounts_sum, assert_full_of_signal

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.runs(2)]


def overrides(task: Task, folder: Path) -> list[str]:
    return [
        "trainer.v1.trainer_mode=goldilocks_async",
        *of_all_lengths(task, folder),
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=ray",
        "ray_kwargs.ray_init.num_gpus=2",
        "data.gen_batch_size=16",
        *LORA,
        "trainer.test_freq=1000",
        f"trainer.validation_data_dir={folder / 'val'}",
    ]


def validated(folder: Path, step: int) -> list[str]:
    """What the servers answered in the validation of a step, without noise."""
    return [row["output"] for row in sorted(json_lines(folder / "val" / f"{step}.jsonl"), key=lambda row: row["input"])]


def test_rollouts_go_on_while_the_trainer_trains_and_a_killed_run_goes_on_with_what_was_in_flight(
    launch: Launch, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*with_agent(tmp_path, monkeypatch, cut=False), *overrides(task, tmp_path)]
    before = killed(launch, tmp_path, *settings, "trainer.val_before_train=True")
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
    # Tools: in each life of the run a rollout makes its call once.
    both = [*before.run.steps[1:], *run.steps]  # the first is the validation before the first update
    assert all(step["accounts/tool_tokens"] > 0 for step in both)
    for life in (before.run, run):
        assert len(answered(life)) == len(set(answered(life)))
    # The adapter: where the newest weights have written something, the trainer agrees with it. The servers have them:
    # without noise the untaught base would answer every prompt as it did before the first update.
    assert "rollout/weights_gap" in both[0]
    assert all(step.get("rollout/weights_gap", 0.0) < 1e-5 for step in both)
    changed = [one != other for one, other in zip(validated(tmp_path, 0), validated(tmp_path, steps[-1]), strict=True)]
    assert any(changed)
