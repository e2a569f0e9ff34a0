"""A TRL run that was cut while a checkpoint was being written, or that has loaded other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import trl_world as world
from transformers import TrainerCallback

from goldilocks.runs.checkpoints import last_whole

SAVED = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
FILTERED = {"filter_groups": {"enable": True}, "engine_slots": 8}


class Killed(Exception):
    """Stands for the signal that ends a process."""


def killed_while_saving(trainer: Any, step: int) -> None:
    """End the run after the weights of this step's checkpoint, before the rest of it."""
    save = trainer._save_optimizer_and_scheduler

    def saved(folder: str) -> None:
        if trainer.state.global_step == step:
            raise Killed
        save(folder)

    trainer._save_optimizer_and_scheduler = saved


def test_a_run_that_was_cut_while_it_saved_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    whole = world.run(tmp_path / "whole", FILTERED, max_steps=5, **SAVED)
    cut = world.trainer(tmp_path / "cut", sections=FILTERED, max_steps=5, **SAVED)
    killed_while_saving(cut, 4)
    with pytest.raises(Killed):
        cut.train()
    assert (tmp_path / "cut" / "checkpoint-4" / "model.safetensors").is_file()
    assert last_whole(tmp_path / "cut") == tmp_path / "cut" / "checkpoint-2"
    again = world.run(tmp_path / "cut", FILTERED, resume=True, max_steps=5, **SAVED)
    assert world.losses(again) == world.losses(whole)
    assert last_whole(tmp_path / "cut") == tmp_path / "cut" / "checkpoint-5"


def test_a_checkpoint_that_is_written_again_counts_when_it_is_whole_again(tmp_path: Path) -> None:
    world.run(tmp_path, FILTERED, max_steps=4, **SAVED)
    again = world.trainer(tmp_path, sections=FILTERED, max_steps=4, **SAVED)
    killed_while_saving(again, 4)
    with pytest.raises(Killed):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert last_whole(tmp_path) == tmp_path / "checkpoint-2"


def test_without_a_whole_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=True is not accepted: .* has no whole checkpoint"):
        world.run(tmp_path, FILTERED, resume=True, max_steps=1)


@pytest.mark.parametrize("end", ["updates", "budget"])
def test_a_run_that_was_over_makes_no_update_when_it_is_started_again(end: str, tmp_path: Path) -> None:
    budget = {"goldilocks": {"budget": {"rollouts": 1}}} if end == "budget" else {}
    steps = 1 if end == "updates" else 9
    chosen = {"sections": {**FILTERED, **budget}, "max_steps": steps, **SAVED, "save_steps": 5}
    first = world.run(tmp_path, **chosen)
    again = world.trainer(tmp_path, **chosen)
    assert again.train(resume_from_checkpoint=True).global_step == first.state.global_step == 1
    assert not list(tmp_path.glob("checkpoint-2"))
    for name, value in first.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


# -- weights that no update has made -----------------------------------------------------------------------------------


def engine_error(trainer: Any) -> float:
    """Return how far the log-probs of the engine's next answers are from the model's own."""
    found = world.engine_errors(trainer)
    world.collect(trainer)
    return max(found)


class FirstIsBest(TrainerCallback):  # type: ignore[misc]
    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        metrics["eval_early"] = -state.global_step


def test_the_engine_has_the_best_model_after_it_was_loaded(tmp_path: Path) -> None:
    chosen = {"eval_dataset": world.dataset(4), "eval_strategy": "steps", "eval_steps": 1, **SAVED, "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "early", "greater_is_better": True}
    evaluated = {"per_device_eval_batch_size": 4, "callbacks": [FirstIsBest()], **chosen, **best}
    trainer = world.run(tmp_path, FILTERED, max_steps=2, **evaluated)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert engine_error(trainer) < 1e-4


def test_the_engine_has_weights_that_the_user_has_loaded(tmp_path: Path) -> None:
    trainer = world.run(tmp_path, FILTERED, max_steps=1)
    trainer.model.load_state_dict({name: 0.5 * value for name, value in trainer.model.state_dict().items()})
    assert engine_error(trainer) < 1e-4
    for parameter in trainer.model.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert engine_error(trainer) < 1e-4
