"""`grpo_pool`: the baseline of a prompt is every rollout seen, whichever of them are trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage

from goldilocks.algorithms.reward_pool import PoolStatistics, grpo_pool, pool_advantages, pool_statistics

WIDTH = 3
QUARTERS = st.integers(-8, 8).map(lambda quarters: quarters / 4)  # exact, so that equal rewards differ by exactly 0
REWARDS = st.lists(st.lists(QUARTERS, min_size=2, max_size=8), min_size=1, max_size=4)


def rows_of(pools: list[list[float]]) -> tuple[np.ndarray, Tensor, Tensor]:
    """uids, token-level rewards with all of the score on the last token, and a mask of uneven lengths."""
    uids = np.array([f"uid{group}" for group, rewards in enumerate(pools) for _ in rewards], dtype=object)
    scores = torch.tensor([reward for rewards in pools for reward in rewards])
    lengths = 1 + torch.arange(len(uids)) % WIDTH
    mask = (torch.arange(WIDTH) < lengths.unsqueeze(-1)).long()
    rewards = torch.zeros(len(uids), WIDTH)
    rewards[torch.arange(len(uids)), lengths - 1] = scores
    return uids, rewards, mask


def by_verl(uids: np.ndarray, rewards: Tensor, mask: Tensor, estimator: str, normalise: bool = True) -> Tensor:
    """Through verl's `compute_advantage`, as its trainers call it."""
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": mask}, non_tensors={"uid": uids}
    )
    config = AlgoConfig(adv_estimator=estimator, norm_adv_by_std_in_grpo=normalise)
    done = compute_advantage(data, estimator, norm_adv_by_std_in_grpo=normalise, config=config)
    assert torch.equal(done.batch["advantages"], done.batch["returns"])
    advantages: Tensor = done.batch["advantages"]
    return advantages


def test_the_estimator_is_registered() -> None:
    assert core_algos.get_adv_estimator_fn("grpo_pool") is grpo_pool


@pytest.mark.parametrize("normalise", [True, False])
@settings(max_examples=20)
@given(pools=REWARDS)
def test_without_pools_it_is_verls_grpo(normalise: bool, pools: list[list[float]]) -> None:
    uids, rewards, mask = rows_of(pools)
    assert torch.equal(
        by_verl(uids, rewards, mask, "grpo_pool", normalise), by_verl(uids, rewards, mask, "grpo", normalise)
    )


@pytest.mark.parametrize("normalise", [True, False])
@settings(max_examples=20)
@given(pools=REWARDS, data=st.data())
def test_a_trained_subset_has_the_advantages_it_has_among_all_rollouts(
    normalise: bool, pools: list[list[float]], data: Any
) -> None:
    uids, rewards, mask = rows_of(pools)
    among_all = by_verl(uids, rewards, mask, "grpo", normalise)
    rows = sorted(data.draw(st.sets(st.integers(0, len(uids) - 1), min_size=1)))
    with pool_statistics({f"uid{group}": PoolStatistics.of(seen) for group, seen in enumerate(pools)}):
        of_subset = by_verl(uids[rows], rewards[rows], mask[rows], "grpo_pool", normalise)
    torch.testing.assert_close(of_subset, among_all[rows], rtol=1e-5, atol=1e-5)


def test_stopping_at_the_first_success_no_longer_hides_the_failures() -> None:
    """Seven failures and a success, of which one each are trained: in the batch it looks like an even prompt."""
    uids, rewards, mask = rows_of([[0.0, 1.0]])
    with pool_statistics({"uid0": PoolStatistics.of([0.0] * 7 + [1.0])}):
        advantages = by_verl(uids, rewards, mask, "grpo_pool")
    std = (7 / 64) ** 0.5 * (8 / 7) ** 0.5
    assert advantages[:, 0].tolist() == pytest.approx([-0.125 / std, 0.875 / std], rel=1e-4)


def test_prompts_without_a_pool_keep_the_baseline_of_the_batch() -> None:
    uids, rewards, mask = rows_of([[0.0, 1.0], [0.0, 1.0, 1.0]])
    with pool_statistics({"uid0": PoolStatistics(0.25, 2.0)}):
        advantages = by_verl(uids, rewards, mask, "grpo_pool")
    assert advantages[:2, 0].tolist() == pytest.approx([-0.125, 0.375], rel=1e-4)
    assert torch.equal(advantages[2:], by_verl(uids, rewards, mask, "grpo")[2:])


def test_statistics_are_gone_when_the_block_ends_also_by_an_error() -> None:
    uids, rewards, mask = rows_of([[0.0, 1.0]])
    with pytest.raises(RuntimeError), pool_statistics({"uid0": PoolStatistics(9.0, 9.0)}):
        raise RuntimeError
    assert torch.equal(by_verl(uids, rewards, mask, "grpo_pool"), by_verl(uids, rewards, mask, "grpo"))


def test_a_generator_may_hold_the_statistics_while_its_consumer_computes() -> None:
    """As a data loader does that hands out a batch and its pools."""

    def batches() -> Any:
        for mean in (0.0, 5.0):
            with pool_statistics({"uid0": PoolStatistics(mean, 1.0)}):
                yield rows_of([[0.0, 1.0]])

    firsts = [by_verl(*rows, "grpo_pool")[0, 0].item() for rows in batches()]
    assert firsts == pytest.approx([0.0, -5.0], abs=1e-4)


def test_the_batch_is_not_written_to() -> None:
    uids, rewards, mask = rows_of([[0.0, 1.0]])
    before = rewards.clone()
    with pool_statistics({"uid0": PoolStatistics(0.5, 0.5)}):
        by_verl(uids, rewards, mask, "grpo_pool")
    assert torch.equal(rewards, before)


def test_a_config_without_the_key_normalises_as_verl_does() -> None:
    uids, rewards, mask = rows_of([[0.0, 2.0]])
    empty = SimpleNamespace(get=lambda key, default: default)
    assert torch.equal(grpo_pool(rewards, mask, uids, config=empty)[0], grpo_pool(rewards, mask, uids)[0])


def test_advantages_are_per_row_and_masked() -> None:
    scores, mean, std = torch.tensor([[1.0, 3.0], [0.0, 1.0], [1.0, 4.0]])
    advantages = pool_advantages(scores, mean, std, torch.tensor([[1, 0], [1, 1]]), normalise=True)
    torch.testing.assert_close(advantages, torch.tensor([[1.0, 0.0], [0.5, 0.5]]), rtol=1e-5, atol=1e-5)


def test_a_pool_of_one_has_no_baseline_and_an_empty_one_is_an_error() -> None:
    assert PoolStatistics.of([0.7]) == (0.0, 1.0)
    with pytest.raises(ValueError, match="rewards is empty"):
        PoolStatistics.of([])
