"""A rollout of several rows counts once in its group, and its advantage reaches each of its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from goldilocks.losses.advantages import POOLED, Untrained, rows_of_rollouts, untrained_rollouts
from goldilocks.types import part_of_row, row_key, split_row_key
from goldilocks.verl.update.trainer import counting_rollouts

WIDTH = 3
QUARTERS = st.integers(-8, 8).map(lambda quarters: quarters / 4)  # exact, so that equal rewards differ by exactly 0
ROLLOUT = st.tuples(QUARTERS, st.lists(st.integers(1, WIDTH), min_size=1, max_size=4))  # reward, tokens of each row
GROUPS = st.lists(st.lists(ROLLOUT, min_size=2, max_size=6), min_size=1, max_size=3)

Groups = list[list[tuple[float, list[int]]]]
Row = tuple[str, float, int]  # its key, the reward of its rollout, its tokens


def rows_of(groups: Groups) -> list[Row]:
    return [
        (row_key(f"g{group}", index, part), reward, tokens)
        for group, rollouts in enumerate(groups)
        for index, (reward, lengths) in enumerate(rollouts)
        for part, tokens in enumerate(lengths)
    ]


def by_verl(rows: list[Row], estimator: str, width: int = WIDTH, normalise: bool = True) -> Tensor:
    """The advantages, as verl's V1 trainer computes them."""
    tokens = torch.tensor([tokens for *_, tokens in rows])
    mask = (torch.arange(width) < tokens.unsqueeze(-1)).long()
    rewards = torch.zeros(len(rows), width)
    rewards[torch.arange(len(rows)), tokens - 1] = torch.tensor([reward for _, reward, _ in rows])
    uids = np.array([key.rsplit("_", 2)[0] for key, *_ in rows], dtype=object)
    data = DataProto.from_dict({"token_level_rewards": rewards, "response_mask": mask}, non_tensors={"uid": uids})
    config = AlgoConfig(adv_estimator=estimator, norm_adv_by_std_in_grpo=normalise)
    keys = [key for key, *_ in rows]
    with rows_of_rollouts([(split_row_key(key), part_of_row(key)) for key in keys]):
        done = compute_advantage_for_multi_trajectories(
            data, keys, estimator, norm_adv_by_std_in_grpo=normalise, config=config
        )
    advantages: Tensor = done.batch["advantages"]
    assert torch.equal(advantages * mask, advantages)
    return advantages


@pytest.mark.parametrize("name", POOLED)
@settings(max_examples=10)
@given(groups=GROUPS, data=st.data())
def test_rows_have_the_advantage_that_their_rollout_has_as_one_row(name: str, groups: Groups, data: Any) -> None:
    rows = data.draw(st.permutations(rows_of(groups)))  # balanced over the ranks, in any order
    whole = [
        (row_key(f"g{group}", index, 0), reward, sum(lengths))
        for group, rollouts in enumerate(groups)
        for index, (reward, lengths) in enumerate(rollouts)
    ]
    widest = max(tokens for *_, tokens in whole)
    as_one = dict(zip((key for key, *_ in whole), by_verl(whole, f"{name}_pool", widest)[:, 0], strict=True))
    for (key, _, tokens), advantages in zip(rows, by_verl(rows, f"{name}_pool"), strict=True):
        torch.testing.assert_close(advantages[:tokens], as_one[f"{key.rpartition('_')[0]}_0"].expand(tokens))


@pytest.mark.parametrize("normalise", [True, False])
@settings(max_examples=10)
@given(groups=GROUPS, data=st.data())
def test_grpo_over_a_pool_of_all_rollouts_is_verls_own(normalise: bool, groups: Groups, data: Any) -> None:
    rows = data.draw(st.permutations(rows_of(groups)))
    ours, verls = (by_verl(rows, name, normalise=normalise) for name in ("grpo_pool", "grpo"))
    torch.testing.assert_close(ours, verls)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo_pool"])
def test_a_penalty_that_would_count_for_the_last_row_alone_is_refused(estimator: str) -> None:
    algorithm = SimpleNamespace(adv_estimator=estimator, use_kl_in_reward=True)
    accepted = (
        rf"algorithm\.use_kl_in_reward=True is not accepted: False with .*{estimator} where rollouts have several"
    )
    with pytest.raises(ValueError, match=accepted), counting_rollouts(algorithm, ["g_0_0", "g_0_1"]):
        raise AssertionError("not refused")
    with counting_rollouts(algorithm, ["g_0_0", "g_1_0"]):
        assert algorithm.adv_estimator == estimator


def test_a_penalty_of_each_token_counts_in_every_row() -> None:
    algorithm = OmegaConf.create({"adv_estimator": "gae", "use_kl_in_reward": True})
    with counting_rollouts(algorithm, ["g_0_0", "g_0_1"]):
        assert algorithm.adv_estimator == "gae"


@settings(max_examples=10)
@given(groups=GROUPS)
def test_untrained_rollouts_count_once_beside_rollouts_of_several_rows(groups: Groups) -> None:
    everything = by_verl(rows_of(groups), "grpo_pool")
    trained = [row for row in rows_of(groups) if row[0].split("_")[1] == "0"]
    others = {
        f"g{group}": [Untrained(reward, sum(lengths)) for reward, lengths in rollouts[1:]]
        for group, rollouts in enumerate(groups)
    }
    with untrained_rollouts(others):
        some = by_verl(trained, "grpo_pool")
    torch.testing.assert_close(some, everything[[place for place, row in enumerate(rows_of(groups)) if row in trained]])
