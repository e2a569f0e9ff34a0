"""The engine in TRL: texts as long as the model's window, and conversations that go on after a tool.

A longer text is refused by the key that ends it. Each turn of a conversation has a seed and a limit of its own.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl_world as world
from unit.engine.architectures import WINDOWED, config_of, made

from goldilocks.trl.engine_rollouts import EngineRollouts, Turns


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


PROMPTS = [[1], [1], [1], [2, 3]]
SEEDS = [10, 11, 12, 13]
TOOL = [8, 8]


def test_the_first_turn_has_the_rollouts_own_seeds() -> None:
    seeds, limits = Turns(PROMPTS, SEEDS, longest=6).next(PROMPTS)
    assert seeds == SEEDS
    assert limits == [6, 6, 6, 6]


def test_a_later_turn_is_known_by_what_its_conversation_has_written() -> None:
    """The first and the third have the same text; the second calls no tool."""
    turns = Turns(PROMPTS, SEEDS, longest=6)
    turns.next(PROMPTS)
    turns.wrote(PROMPTS, [[5], [6], [5], [7, 7]])
    asked = [[1, 5, *TOOL], [1, 5, *TOOL], [2, 3, 7, 7, *TOOL]]
    seeds, limits = turns.next(asked)
    assert len({*seeds, *SEEDS}) == len(seeds) + len(SEEDS)
    assert limits == [3, 3, 2]
    turns.wrote(asked, [[4], [4], [9]])
    _, limits = turns.next([[2, 3, 7, 7, *TOOL, 9, *TOOL]])
    assert limits == [1]  # TRL cuts what does not fit
    again = Turns([[2, 3]], [13], longest=6)
    again.next([[2, 3]])
    again.wrote([[2, 3]], [[7, 7]])
    assert again.next([[2, 3, 7, 7, *TOOL]])[0] == [seeds[2]]  # whatever is generated beside it


@pytest.mark.parametrize("training", [True, False])
def test_a_group_on_two_processes_draws_no_noise_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    trainer = world.trainer(tmp_path, sections={"engine_slots": 2})
    trainer.model.train(training)
    seeds = []
    for rank in range(2):  # four rollouts of one prompt, two on each process
        monkeypatch.setattr(trainer, "accelerator", SimpleNamespace(process_index=rank))
        seeds += trainer._plain_seeds([[1, 2]] * 2)
    assert len(set(seeds)) == 4
