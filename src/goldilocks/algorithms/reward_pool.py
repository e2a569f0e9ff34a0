"""Estimator ``grpo_pool``: GRPO whose baseline is the whole pool of rollouts seen, not the rows that are trained.

Adaptive rollouts stop on what they see and may train only some of it, so the mean of a prompt's trained rows is biased.
The trainer knows the pool and verl's estimators are not handed it; it is set around the computation instead:

    with pool_statistics({group.uid: PoolStatistics.of(group.rewards) for group in groups}):
        ...verl computes the advantages, in this thread...

Invariant: a row's baseline depends on its own prompt's pool only; prompts without one get exactly verl's GRPO.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

NAME = "grpo_pool"
EPSILON = 1e-6  # verl's, beside the standard deviation


class PoolStatistics(NamedTuple):
    """Mean and unbiased standard deviation of every reward seen for a prompt."""

    mean: float
    std: float

    @classmethod
    def of(cls, rewards: Sequence[float]) -> PoolStatistics:
        """A pool of one has no baseline: 0 and 1, as GRPO has it."""
        if not rewards:
            raise ValueError("rewards is empty; a pool has one or more")
        if len(rewards) == 1:
            return cls(0.0, 1.0)
        return cls(statistics.fmean(rewards), statistics.stdev(rewards))


_pools: ContextVar[Mapping[str, PoolStatistics] | None] = ContextVar("pool statistics by uid", default=None)


@contextmanager
def pool_statistics(pools: Mapping[str, PoolStatistics]) -> Iterator[None]:
    """Within it, ``grpo_pool`` takes the baseline of these uids from here."""
    token = _pools.set(pools)
    try:
        yield
    finally:
        _pools.reset(token)


def pool_advantages(
    scores: Tensor, group_mean: Tensor, group_std: Tensor, response_mask: Tensor, normalise: bool
) -> Tensor:
    """(score − mean) of each row, over the standard deviation if ``normalise``, at every token of its response.

    ``scores``, ``group_mean`` and ``group_std`` hold one number per row, ``response_mask`` one per token.
    """
    centred = scores - group_mean
    scaled = centred / (group_std + EPSILON) if normalise else centred
    return scaled.unsqueeze(-1) * response_mask


@torch.no_grad()
def grpo_pool(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """The estimator verl calls, with its arguments; advantages and returns are the same."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    normalise = True if config is None else bool(config.get("norm_adv_by_std_in_grpo", True))
    in_batch, _returns = compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, epsilon=EPSILON, norm_adv_by_std_in_grpo=normalise
    )
    pools = _pools.get() or {}
    rows = [row for row, uid in enumerate(index) if uid in pools]
    if not rows:
        return in_batch, in_batch
    scores = token_level_rewards[rows].sum(-1)
    mean, std = scores.new_tensor([pools[index[row]] for row in rows]).unbind(-1)
    in_batch[rows] = pool_advantages(scores, mean, std, response_mask[rows], normalise).to(in_batch.dtype)
    return in_batch, in_batch
