"""TRL's engine serves texts as long as the model's window, and refuses longer ones by the key that ends it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trl_world as world
from unit.engine.architectures import WINDOWED, config_of, made

from goldilocks.trl.engine_rollouts import EngineRollouts


def rollouts(out: Path, completion: int) -> EngineRollouts:
    args = world.arguments(out, max_completion_length=completion)
    return EngineRollouts(args, slots=2, eos_ids=[5], pad_id=0, device=torch.device("cpu"))


def test_a_text_that_the_window_holds_is_generated_though_the_cache_has_room_for_more(tmp_path: Path) -> None:
    model = made(config_of(WINDOWED["mistral"]))
    found = rollouts(tmp_path, completion=8).generate(model, 0, [[1, 2, 3, 4], [7]], [0, 1], [8, 8])
    assert all(1 <= len(one.token_ids) <= 8 for one in found)


def test_a_longer_one_is_refused_by_the_key(tmp_path: Path) -> None:
    model = made(config_of(WINDOWED["mistral"]))
    message = "max_completion_length with the longest prompt=13 .* the model's sliding_window=12 or less"
    with pytest.raises(ValueError, match=message):
        rollouts(tmp_path, completion=8).generate(model, 0, [[1, 2, 3, 4, 5], [7]], [0, 1], [8, 8])


def test_completions_longer_than_the_window_are_refused_before_the_start(tmp_path: Path) -> None:
    model = made(config_of(WINDOWED["mistral"]))
    with pytest.raises(ValueError, match=r"max_completion_length \+ 1=13 .* the model's sliding_window=12 or less"):
        world.trainer(tmp_path, model=model, sections={"engine_slots": 2}, max_completion_length=12)
