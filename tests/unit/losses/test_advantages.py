"""The pool estimators: a group's baseline is every rollout seen, whichever of them are trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage

from goldilocks.losses.advantages import NOT_POOLED, POOLED, Untrained, pool_estimator, untrained_rollouts

WIDTH = 3
QUARTERS = st.integers(-8, 8).map(lambda quarters: quarters / 4)  # exact, so that equal rewards differ by exactly 0
REWARDS = st.lists(st.lists(QUARTERS, min_size=2, max_size=8), min_size=1, max_size=4)
NO_GROUP_BASELINE = {"gae", "reinforce_plus_plus", "remax"}


def rows_of(pools: list[list[float]]) -> tuple[np.ndarray, Tensor, Tensor]:
    """uids, token-level rewards with all of the score on the last token, and a mask of uneven lengths."""
    uids = np.array([f"uid{group}" for group, rewards in enumerate(pools) for _ in rewards], dtype=object)
    lengths = 1 + torch.arange(len(uids)) % WIDTH
    rewards = torch.zeros(len(uids), WIDTH)
    rewards[torch.arange(len(uids)), lengths - 1] = torch.tensor([reward for rewards in pools for reward in rewards])
    return uids, rewards, (torch.arange(WIDTH) < lengths.unsqueeze(-1)).long()


def by_verl(uids: np.ndarray, rewards: Tensor, mask: Tensor, estimator: str, normalise: bool = True) -> Tensor:
    """Through verl's `compute_advantage`, as its trainers call it."""
    data = DataProto.from_dict({"token_level_rewards": rewards, "response_mask": mask}, non_tensors={"uid": uids})
    config = AlgoConfig(adv_estimator=estimator, norm_adv_by_std_in_grpo=normalise)
    done = compute_advantage(data, estimator, norm_adv_by_std_in_grpo=normalise, config=config)
    assert done.batch["returns"].shape == mask.shape
    advantages: Tensor = done.batch["advantages"]
    return advantages


def others(uids: np.ndarray, rewards: Tensor, mask: Tensor, trained: list[int]) -> dict[str, list[Untrained]]:
    """The rollouts that are not trained, by group."""
    found: dict[str, list[Untrained]] = {}
    for row in sorted(set(range(len(uids))) - set(trained)):
        found.setdefault(uids[row], []).append(Untrained(float(rewards[row].sum()), int(mask[row].sum())))
    return found


def test_every_estimator_of_verl_is_pooled_refused_or_without_a_group_baseline() -> None:
    """Fails when verl has a new estimator: say which of the three it is."""
    names = {estimator.value for estimator in core_algos.AdvantageEstimator}
    assert names == {*POOLED, *NOT_POOLED, *NO_GROUP_BASELINE}


@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize("normalise", [True, False])
@settings(max_examples=5)
@given(pools=REWARDS)
def test_where_all_are_trained_it_is_verls_estimator(name: str, normalise: bool, pools: list[list[float]]) -> None:
    uids, rewards, mask = rows_of(pools)
    pool, plain = (by_verl(uids, rewards, mask, one, normalise) for one in (f"{name}_pool", name))
    assert torch.equal(pool, plain)


@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize("normalise", [True, False])
@settings(max_examples=5)
@given(pools=REWARDS, data=st.data())
def test_a_trained_subset_has_the_advantages_it_has_among_all_rollouts(
    name: str, normalise: bool, pools: list[list[float]], data: Any
) -> None:
    uids, rewards, mask = rows_of(pools)
    among_all = by_verl(uids, rewards, mask, name, normalise)
    groups = [np.flatnonzero(uids == uid).tolist() for uid in dict.fromkeys(uids)]
    trained = sorted(row for rows in groups for row in data.draw(st.sets(st.sampled_from(rows), min_size=1)))
    with untrained_rollouts(others(uids, rewards, mask, trained)):
        of_subset = by_verl(uids[trained], rewards[trained], mask[trained], f"{name}_pool", normalise)
    torch.testing.assert_close(of_subset, among_all[trained], rtol=1e-5, atol=1e-5)


def test_an_untrained_rollout_may_be_longer_than_all_that_are_trained() -> None:
    uids, rewards, mask = rows_of([[1.0, 0.0]])
    with untrained_rollouts({"uid0": [Untrained(0.0, 50)]}):
        advantages = by_verl(uids, rewards, mask, "opo_pool")  # its baseline weighs rewards by length: 1 / (1 + 2 + 50)
    assert advantages.shape == mask.shape
    assert advantages[0, 0].item() == pytest.approx(1 - 1 / 53)


def test_untrained_rollouts_are_forgotten_when_the_block_ends_also_by_an_error() -> None:
    uids, rewards, mask = rows_of([[0.0, 1.0]])
    with pytest.raises(RuntimeError), untrained_rollouts({"uid0": [Untrained(9.0, 1)]}):
        raise RuntimeError
    assert torch.equal(by_verl(uids, rewards, mask, "grpo_pool"), by_verl(uids, rewards, mask, "grpo"))


def test_the_batch_is_not_written_to() -> None:
    uids, rewards, mask = rows_of([[0.0, 1.0]])
    before = rewards.clone()
    with untrained_rollouts({"uid0": [Untrained(0.5, 1)]}):
        by_verl(uids, rewards, mask, "grpo_pool")
    assert torch.equal(rewards, before)


@pytest.mark.parametrize("name", POOLED)
def test_an_estimator_with_a_group_baseline_becomes_its_pool_form(name: str) -> None:
    assert pool_estimator(name, use_kl_in_reward=False) == f"{name}_pool"
    assert pool_estimator(f"{name}_pool", use_kl_in_reward=False) == f"{name}_pool"
    with pytest.raises(ValueError, match=rf"use_kl_in_reward=True is not accepted: False with .*={name}_pool"):
        pool_estimator(name, use_kl_in_reward=True)


@pytest.mark.parametrize("name", sorted(NO_GROUP_BASELINE))
def test_an_estimator_without_a_group_baseline_stays(name: str) -> None:
    assert pool_estimator(name, use_kl_in_reward=True) == name


@pytest.mark.parametrize("name", NOT_POOLED)
def test_an_estimator_whose_pool_cannot_be_had_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"algorithm.adv_estimator='{name}' is not accepted: grpo, .*max_train_n"):
        pool_estimator(name, use_kl_in_reward=False)


class LargestTemporary(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        return result


@pytest.mark.parametrize("name", POOLED)
def test_rollouts_that_are_not_trained_cost_no_memory_for_their_tokens(name: str) -> None:
    uids, rewards, mask = rows_of([[1.0, 0.0], [0.5, 1.0]])
    with untrained_rollouts({uid: [Untrained(0.25, 8192)] * 16 for uid in uids}), LargestTemporary() as largest:
        core_algos.get_adv_estimator_fn(f"{name}_pool")(
            token_level_rewards=rewards, response_mask=mask, index=uids, config=AlgoConfig(adv_estimator=name)
        )
    assert largest.elements < 8192
