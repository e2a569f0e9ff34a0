"""``benchmarks/trainer.py``: the task keeps its promises, and figures come from the right metrics."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest
import random_task as task
import torch
import trainer
from transformers import AutoModelForCausalLM

TIMES = {"timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/update_actor": 2.0, "timing_s/update_weights": 1.0}


def test_the_model_ends_an_answer_with_the_same_chance_after_any_text(tmp_path: Path) -> None:
    task.make_model(tmp_path, task.SHAPES["tiny"], mean=20, longest=160, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(4, 1_000, (3, 40), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        chances = model(ids).logits.softmax(-1)[..., task.SPECIAL.index(task.END)]
    assert chances == pytest.approx(torch.full((3, 40), 1 / 20).numpy(), rel=0.05)


def test_a_larger_share_has_the_same_prompts_that_teach_and_more(tmp_path: Path) -> None:
    mixed = {}
    for keep in (0.2, 0.5):
        task.make_data(tmp_path / str(keep), task.SHAPES["tiny"], keep)
        rows = pandas.read_parquet(tmp_path / str(keep) / "data.parquet")
        truths = [one["ground_truth"] for one in rows.reward_model]
        mixed[keep] = {index for index, truth in enumerate(truths) if truth == "mixed"}
        shares = [len(mixed[keep].intersection(range(start, start + 64))) / 64 for start in range(len(rows) - 64)]
        assert shares == pytest.approx([keep] * len(shares), abs=0.04)  # of any batch
    assert mixed[0.2] < mixed[0.5]


def test_of_verl_the_dropped_groups_count_at_the_mean_length() -> None:
    filtered = {"training/filter_groups/evicted_samples": 3, "training/filter_groups/discarded_surplus_samples": 1}
    steps = [TIMES | filtered | {"response_length/mean": 50.0, "timing_s/old_log_prob": 0.5}] * 3
    found = trainer.figures(steps, warm_up=1, groups=4, n=8)
    assert (found.steps, found.step, found.thrown_away) == (2, 10.0, 2)
    assert found.parts == {"gen": 6.0, "log-probs": 0.5, "update": 2.0, "weights": 1.0, "rest": 0.5}
    assert found.rollouts_per_group == 16  # 4 trained, 3 dropped and 1 thrown away, of 8 rollouts, for 4 trained
    assert found.tokens_per_s == 8 * 8 * 50 / 10


def test_of_ours_the_warm_up_is_taken_off_the_accounts() -> None:
    counted = [
        TIMES
        | {"accounts/generated_rollouts": rollouts, "accounts/generated_tokens": 40 * rollouts}
        | {"train/groups_expired": 1, "response_length/mean": 44.0}
        for rollouts in (100, 180, 260)
    ]
    found = trainer.figures(counted, warm_up=1, groups=4, n=8)
    assert (found.rollouts_per_group, found.thrown_away, found.started, found.length) == (20, 2, 40, 44)


def test_an_arm_that_is_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    found = trainer.figures([TIMES | {"response_length/mean": 50.0}], warm_up=0, groups=4, n=8)
    trainer.Kept(file, {"groups": 4}).add(trainer.arms([0.5])[0], found)
    assert trainer.Kept(file, {"groups": 4}).arms == {"verl sync": found}
    with pytest.raises(SystemExit, match="expected a file of"):
        trainer.Kept(file, {"groups": 8})
