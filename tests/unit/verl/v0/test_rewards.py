"""A reward function given as an object reaches verl's workers."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager

from goldilocks import TrainerConfig
from goldilocks.verl.v0.rewards import mark_validation, route


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


def routed(reward_fn: Any, val_reward_fn: Any = None) -> Any:
    """What verl's reward workers load, and with which arguments."""
    verl_config = TrainerConfig().to_verl()
    assert route(verl_config, reward_fn, val_reward_fn)
    return get_custom_reward_fn(verl_config)


def test_a_reward_function_reaches_verls_workers_closure_and_all():
    right = "42"
    function = routed(lambda data_source, solution_str, ground_truth, extra_info: solution_str == right)
    assert function(data_source="", solution_str="42", ground_truth="", extra_info={}) is True


def test_validation_prompts_are_graded_by_their_own_function():
    def train(data_source, solution_str, ground_truth, extra_info):
        return {"score": 1.0, **extra_info}

    function = routed(train, lambda data_source, solution_str, ground_truth, extra_info: 7.0)
    batch = DataProto.from_dict(tensors={"x": torch.zeros(1)}, non_tensors={"extra_info": np.array([{"index": 3}])})
    arguments = {"data_source": "", "solution_str": "", "ground_truth": ""}
    assert function(**arguments, extra_info=batch.non_tensor_batch["extra_info"][0]) == {"score": 1.0, "index": 3}
    mark_validation(batch)
    assert function(**arguments, extra_info=batch.non_tensor_batch["extra_info"][0]) == 7.0


def test_a_reward_function_of_other_arguments_is_refused():
    with pytest.raises(ValueError, match="a function of data_source, solution_str, ground_truth, extra_info"):
        route(TrainerConfig().to_verl(), lambda data: 0.0, None)


class WithReturnDict:
    """A reward manager as guides have it: called with rows, and whether to return more than a tensor."""

    def __init__(self, right: float, extra: bool = True) -> None:
        self.right, self.extra = right, extra

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        rewards = torch.zeros(len(data), data.batch["responses"].shape[1])
        rewards[:, -1] = torch.tensor([float(len(row.non_tensor_batch["extra_info"])) + self.right for row in data])
        extra = {"acc": [1.0] * len(data), "who": ["me"] * len(data)}
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict and self.extra else rewards


def one_row() -> DataProto:
    return DataProto.from_dict(
        {key: torch.ones(1, n).long() for key, n in (("prompts", 2), ("responses", 3), ("attention_mask", 5))},
        non_tensors={"extra_info": np.array([{"index": 3}], dtype=object)},
    )


def test_a_reward_manager_that_is_called_with_rows_scores_them_one_by_one():
    verl_config = TrainerConfig().to_verl()
    assert route(verl_config, WithReturnDict(1.0), WithReturnDict(7.0, extra=False))
    called = load_reward_manager(verl_config, tokenizer=None)
    rows = one_row()
    assert asyncio.run(called.run_single(rows)) == {"reward_score": 2.0, "reward_extra_info": {"acc": 1.0, "who": "me"}}
    mark_validation(rows)
    assert asyncio.run(called.run_single(rows)) == {"reward_score": 8.0, "reward_extra_info": {"acc": 8.0}}
    assert type(called).assemble_rm_scores(one_row(), [2.0]).tolist() == [[0.0, 0.0, 2.0]]


def test_reward_managers_that_are_called_with_rows_are_not_mixed_with_functions_or_our_keys():
    with pytest.raises(ValueError, match="reward_fn and val_reward_fn have different arguments"):
        route(TrainerConfig().to_verl(), WithReturnDict(1.0), by_length)
    limited = TrainerConfig(goldilocks={"rewards": {"retries": 2}}).to_verl()
    with pytest.raises(ValueError, match=r"goldilocks.rewards='set' is not accepted: none with reward_fn=WithReturn"):
        route(limited, WithReturnDict(1.0), None)


def by_length(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))


def manager(name: str, compute_score: Any) -> Any:
    """A reward manager as a script builds it."""
    return get_reward_manager_cls(name)(config=TrainerConfig().to_verl(), tokenizer=None, compute_score=compute_score)


def test_the_function_of_a_reward_manager_is_the_one_that_scores():
    function = routed(manager("naive", by_length))
    assert function(data_source="", solution_str="four", ground_truth="", extra_info={}) == 4.0
    partial = routed(manager("naive", functools.partial(by_length)))
    assert partial(data_source="", solution_str="four", ground_truth="", extra_info={}) == 4.0


def test_a_reward_manager_of_the_config_or_no_function_at_all_is_left_to_the_config():
    verl_config = TrainerConfig(reward={"custom_reward_function": {"path": __file__, "name": "by_length"}}).to_verl()
    before = verl_config.copy()
    assert not route(verl_config, manager("naive", None), manager("naive", get_custom_reward_fn(verl_config)))
    assert not route(verl_config, None, None)
    assert verl_config == before


def test_a_reward_manager_that_the_config_does_not_name_is_refused():
    with pytest.raises(ValueError, match=r"reward_fn=Mine is not accepted: .* NaiveRewardManager; name yours there"):
        routed(type("Mine", (), {"run_single": None})())
