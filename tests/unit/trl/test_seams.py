"""What is taken for granted of TRL, and what a user is told."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from goldilocks.trl.collection import warn_of_changes
from goldilocks.trl.rows import DatasetPrompts, SamplerOrder, Sections

ARGS = SimpleNamespace(generation_batch_size=32, num_generations=8, max_completion_length=64, seed=5)


def test_a_trl_that_has_changed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_changes([(GRPOTrainer._prepare_inputs, ("0123456789abcdef",))], "1.14 to 1.16")
    assert "has another GRPOTrainer._prepare_inputs than TRL 1.14 to 1.16" in caplog.text


@pytest.mark.parametrize("shuffle", [True, False])
def test_prompts_come_in_the_order_of_trls_sampler(shuffle: bool) -> None:
    data = list(range(11))
    sampler = RepeatSampler(data, mini_repeat_count=3, batch_size=4, repeat_count=2, shuffle=shuffle, seed=7)
    theirs = [list(sampler)[::3] for _ in range(3)]  # each batch comes twice in a row
    batches = [[epoch[at : at + 4] for at in range(0, len(epoch), 8)] for epoch in theirs]
    order = SamplerOrder(data, groups=4, shuffle=shuffle, seed=7)
    for epoch in (0, 2, 1):  # in any order: a run goes on in the middle
        assert order(epoch).tolist() == [index for batch in batches[epoch] for index in batch]


def test_sizes_come_from_grpo_config_and_the_rest_from_the_sections() -> None:
    settings = Sections(filter_groups={"enable": True, "max_carry_steps": 3}, gen_batch_size=12).settings(ARGS)
    assert (settings.train_batch_size, settings.n, settings.gen_batch_size, settings.seed) == (4, 8, 12, 5)
    assert settings.surplus().max_carry_steps == 3


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"filter_groups": {"enabled": True}}, r"filter_groups\.enabled is not a key \(did you mean 'enable'\?\)"),
        ({"adaptive_rollout": {"enable": True, "max_n": 2}}, r"adaptive_rollout\.max_n=2 is not accepted"),
        ({"filter_groups": True}, r"filter_groups=True is not accepted: a section of keys"),
        ({"goldilocks": {"selector": "thomson"}}, "thompson"),
        ({"goldilocks": {"rewards": {"retries": 3}}}, r"goldilocks\.rewards=.* is not accepted: no key on TRL"),
        ({"batch_filter": {"enable": True, "novel": 1}}, "novel"),
    ],
)
def test_a_mistake_is_answered_as_in_verls_config(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sections(**sections).settings(ARGS)


@pytest.mark.parametrize(
    ("dataset", "message"), [(iter([]), "a length and random access"), ([{"question": "1+1="}], "the column 'prompt'")]
)
def test_data_that_cannot_be_chosen_from_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DatasetPrompts(dataset)


def test_rows_of_the_same_prompt_are_not_one_object() -> None:
    prompts = DatasetPrompts([{"prompt": "1+1="}, {"prompt": "1+2="}])
    first, second = prompts.rows([1, 1])
    assert first == second == {"prompt": "1+2="}
    assert first is not second
    assert prompts[1].key == int(prompts.keys()[1])
