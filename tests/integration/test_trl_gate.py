"""``batch_filter`` on TRL: limits and metrics of the refill loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_files import logged

pytest.importorskip("trl")

import trl_world as world

from goldilocks.core import Exhausted
from goldilocks.drive.driver import MAX_REFILLS
from goldilocks.runs.checkpoints import last_whole


def lines(out: Path) -> list[dict[str, float]]:
    read = logged(out)
    return [data for data in read if "critic/score/mean" in data]


def test_a_gate_that_refuses_everything_ends_the_run_and_its_state_is_saved(tmp_path: Path) -> None:
    rounds: list[int] = []

    def reward(completions: list[Any], right: list[int], **columns: Any) -> list[float]:
        rounds.append(len(completions))
        assert len(rounds) <= 1 + MAX_REFILLS, "the limit counts the refills of a batch"
        return world.reward(completions, right, **columns)

    sections = {"batch_filter": {"enable": True, "reward_threshold": 2.0}, "engine_slots": 16}
    trainer = world.trainer(tmp_path, sections=sections, reward_funcs=reward)
    with pytest.raises(
        Exhausted, match=rf"After {MAX_REFILLS} refills .* What was generated is saved in .*checkpoint-0"
    ):
        trainer.train()
    assert len(rounds) == 1 + MAX_REFILLS
    assert last_whole(tmp_path) == tmp_path / "checkpoint-0"
    again = world.trainer(tmp_path, sections={**sections, "batch_filter": {"enable": True}}, max_steps=1)
    again.train(resume_from_checkpoint=True)
    assert lines(tmp_path)[-1]["accounts/rejected_rollouts"] >= sum(rounds)


def test_every_judgement_of_a_step_is_in_its_metrics(tmp_path: Path) -> None:
    """Groups without variance are refused after they were kept, and others take their place."""
    sections = {"batch_filter": {"enable": True}, "engine_slots": 16}
    trainer = world.trainer(tmp_path, sections=sections, max_steps=4)
    trainer.train()
    rejected = [line["train/groups_rejected"] for line in lines(tmp_path)]
    assert any(rejected)
    assert [line["batch/total_groups_generated"] for line in lines(tmp_path)] == [4 + count for count in rejected]
