"""``GoldilocksRLOOTrainer`` trains: the tiny model on the CPU, TRL's own trainer beside it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import trl_world as world
from trl import RLOOTrainer

from goldilocks.trl import GoldilocksRLOOTrainer
from goldilocks.trl.rows import LOG_PROB

KL = {"beta": 0.5, "reward_clip_range": (0.0, 1.0)}
run = functools.partial(world.run, ours=GoldilocksRLOOTrainer)
TWICE = {"beta": 0.0, "num_iterations": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("chosen", [KL, TWICE], ids=["penalty", "two updates a batch"])
def test_with_everything_off_it_trains_what_trl_trains(chosen: dict[str, Any], tmp_path: Path) -> None:
    theirs = world.run(tmp_path / "theirs", ours=RLOOTrainer, **chosen)
    world.assert_same_training(run(tmp_path / "ours", {"goldilocks": {}}, **chosen), theirs)


def test_a_batch_put_together_from_rows_has_trls_advantages(tmp_path: Path) -> None:
    """The batch that the collector would join, of the very rollouts that TRL made a batch of."""
    trainer = run(tmp_path, {"goldilocks": {}}, max_steps=1, normalize_advantages=True, **KL)
    collection = trainer.collection
    found = collection._advantages(collection.batch, trainer._rewards())
    assert found == pytest.approx(collection.trained, abs=1e-5)
    assert len({round(value, 4) for value in found.values()}) > 2  # the penalty tells equal rewards apart


def test_carried_groups_are_trained_against_the_policy_that_wrote_them(tmp_path: Path) -> None:
    """Groups of different sizes fill a batch up with rows that train nothing."""
    adaptive = {"enable": True, "max_n": 9, "rollouts_per_batch": 3, "stop": "contrast"}
    sections = {**world.CARRYING, "adaptive_rollout": adaptive}
    sizes = {"per_device_train_batch_size": 8, "steps_per_generation": 2}
    chosen = {**sizes, "beta": 0.1, "reward_funcs": world.every_third, "max_steps": 4}
    trainer = run(tmp_path, sections, save_strategy="steps", save_steps=2, **chosen)
    collection = trainer.collection
    older = [group for group in collection.batch.groups if group.version < collection.driver.collector.step]
    assert older
    rows = [collection.rows[rollout.uid, rollout.index] for group in older for rollout in group.trained]
    now = [(one * row.loss_mask).sum() for one, row in zip(trainer._log_probs(rows), rows, strict=True)]
    assert any(abs(float(one - row.tensors[LOG_PROB])) > 1e-3 for one, row in zip(now, rows, strict=True))
    assert all(abs(loss) < 100 for loss in world.losses(trainer))
    again = run(tmp_path, sections, resume=str(tmp_path / "checkpoint-2"), **chosen)
    assert world.losses(again) == pytest.approx(world.losses(trainer), rel=1e-3)


def test_the_engine_generates_and_rows_without_signal_are_left_out(tmp_path: Path) -> None:
    whole, part = (
        run(tmp_path / str(only), {"goldilocks": {}, "engine_slots": 16, "only_signal": only}, max_steps=2, beta=0.0)
        for only in (False, True)
    )
    assert torch.allclose(world.weights(whole), world.weights(part), atol=1e-5)
