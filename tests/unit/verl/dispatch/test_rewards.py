"""A rollout graded where it is has the reward that verl's reward worker gives it."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl_world import Worker

from goldilocks.verl.dispatch.single_turn import reward_manager_of

VERLS_OWN = AgentLoopWorker._compute_score
ROW = {
    "data_source": "goldilocks/arithmetic",
    "reward_model": {"style": "rule", "ground_truth": "12"},
    "extra_info": {"index": 3, "difficulty": 1.0},
    "raw_prompt": [{"role": "user", "content": "5+7="}],
    "uid": "a",
}


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
async def test_the_reward_is_that_of_verls_worker(text):
    one = Worker(whole=False)
    expected = await scored(VERLS_OWN, one, text)
    assert one.grader.calls["compute_score"] == 1
    found = await scored(Worker._compute_score, one, text)
    assert one.grader.calls["compute_score"] == 1
    assert found == expected
    assert found[0] == float(text.strip() == "12")


async def test_the_row_is_not_written_to():
    row = dict(ROW, extra_info=dict(ROW["extra_info"]))
    one = Worker(whole=False)
    await one._compute_score([rollout("12", one.tokenizer)], row)
    assert row == ROW


@pytest.mark.parametrize("changes", [{"reward_model": {"enable": True}}, {"sandbox_fusion": {"url": "http://x"}}])
async def test_other_rewards_stay_with_their_workers(changes):
    one = Worker(whole=False)
    one.config = OmegaConf.merge(one.config, {"reward": changes})
    assert reward_manager_of(one) is None
