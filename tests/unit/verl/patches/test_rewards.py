"""A rollout graded where it is has the reward that verl's reward worker gives it."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.trainer.ppo.reward import load_reward_manager

from goldilocks.tasks.tokenizer import character_tokenizer
from goldilocks.verl.guarded_reward import guarded
from goldilocks.verl.patches.patch import digest
from goldilocks.verl.patches.rewards import RUN_SINGLE, graded_here, manager_of

VERLS_OWN = inspect.unwrap(AgentLoopWorker._compute_score)
ROW = {
    "data_source": "goldilocks/arithmetic",
    "reward_model": {"style": "rule", "ground_truth": "12"},
    "extra_info": {"index": 3, "difficulty": 1.0},
    "raw_prompt": [{"role": "user", "content": "5+7="}],
    "uid": "a",
}


def worker(path="pkg://goldilocks.tasks.registry", **changes):
    """What ``_compute_score`` reads of verl's worker; the reward worker is verl's own manager in this process."""
    function = guarded({"path": path, "name": "compute_score"})
    reward = {
        "custom_reward_function": function,
        "reward_manager": {"name": "naive", "source": "register"},
        "reward_model": {"enable": False},
        **changes,
    }
    config = OmegaConf.create({"reward": reward})
    tokenizer = character_tokenizer()
    manager = load_reward_manager(config, tokenizer)
    calls = []

    def remote(data):
        calls.append(data)
        return manager.run_single(data)

    handle = SimpleNamespace(compute_score=SimpleNamespace(remote=remote))
    return SimpleNamespace(
        config=config,
        tokenizer=tokenizer,
        calls=calls,
        reward_loop_worker_handles=[handle],
        _compute_multi_modal_inputs=lambda output, ids: {},
        _compute_position_ids=lambda ids, mask, *rest: mask.cumsum(-1) - 1,
        _get_mm_processor_kwargs=lambda audios: {},
    )


def rollout(text, tokenizer):
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    return AgentLoopOutput(
        prompt_ids=tokenizer.encode("5+7="),
        response_ids=ids,
        response_mask=[1] * len(ids),
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields={"turn_scores": []},
    )


async def scored(compute, one, text):
    output = rollout(text, one.tokenizer)
    await compute(one, [output], dict(ROW, extra_info=dict(ROW["extra_info"])))
    return output.reward_score, output.extra_fields["reward_extra_info"]


@pytest.mark.parametrize("text", ["12", "13", " 12 ", ""])
def test_the_reward_is_that_of_verls_worker(text):
    async def both():
        one = worker()
        expected = await scored(VERLS_OWN, one, text)
        assert len(one.calls) == 1
        found = await scored(graded_here(VERLS_OWN), one, text)
        assert len(one.calls) == 1
        return found, expected

    found, expected = asyncio.run(both())
    assert found == expected
    assert found[0] == float(text.strip() == "12")


def test_the_row_is_not_written_to():
    row = dict(ROW, extra_info=dict(ROW["extra_info"]))

    async def grade():
        one = worker()
        await graded_here(VERLS_OWN)(one, [rollout("12", one.tokenizer)], row)

    asyncio.run(grade())
    assert row == ROW


@pytest.mark.parametrize("changes", [{"reward_model": {"enable": True}}, {"sandbox_fusion": {"url": "http://x"}}])
def test_other_rewards_stay_with_their_workers(changes):
    async def manager():
        one = worker()
        one.config = OmegaConf.merge(one.config, {"reward": changes})
        return manager_of(one)

    assert asyncio.run(manager()) is None


def test_the_manager_is_the_one_this_follows():
    assert digest(NaiveRewardManager.run_single) == RUN_SINGLE
