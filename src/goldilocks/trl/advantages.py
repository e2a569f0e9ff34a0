"""Advantages as TRL defines them, for groups of any size.

The baseline and the standard deviation are over all rollouts of a group, whether or not all of them are trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-4  # TRL's


def advantages(groups: Sequence[Tensor], weights: Tensor, scale: str, aggregation: str) -> list[Tensor]:
    """Return the advantage of each rollout, by group.

    ``groups`` has a tensor ``[rollouts, reward functions]`` each, NaN where a function does not apply; ``scale`` and
    ``aggregation`` are ``GRPOConfig.scale_rewards`` and ``multi_objective_aggregation``.
    """
    if aggregation == "normalize_then_sum":
        return _normalize_then_sum(groups, weights)
    totals = [(rewards * weights).nansum(1) for rewards in groups]
    centred = [total - total.mean() for total in totals]
    if scale == "none":
        return centred
    if scale == "batch":
        spread = _std(torch.cat(totals), 0)
        return [one / (spread + EPSILON) for one in centred]
    return [one / (_std(total, 0) + EPSILON) for one, total in zip(centred, totals, strict=True)]


def _normalize_then_sum(groups: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """Normalize each reward function within its group, add them up, and normalize the sums over the batch."""
    normal = [(one - one.nanmean(0)) / (_std(one, 0) + EPSILON) for one in groups]
    sums = [(one * weights).nansum(1) for one in normal]
    everything = torch.cat(sums)
    mean, spread = everything.mean(), _std(everything, 0)
    return [(one - mean) / (spread + EPSILON) for one in sums]


def leave_one_out(groups: Sequence[Tensor], *, normalize: bool) -> list[Tensor]:
    """Return RLOO's advantage of each rollout, by group: its score minus the mean of the others'.

    ``groups`` has the scores of each group, NaN where no reward function applies: such a rollout has no advantage.
    """
    found = [score - (score.nansum() - score) / ((~score.isnan()).sum() - 1) for score in groups]
    if normalize:
        everything = torch.cat(found)
        mean, spread = everything.nanmean(), _std(everything, 0)
        found = [(one - mean) / (spread + EPSILON) for one in found]
    return [one.nan_to_num(0.0) for one in found]


def _std(values: Tensor, dim: int) -> Tensor:
    """Return the unbiased standard deviation without NaNs; zero where there is one value only."""
    there = ~values.isnan()
    count = there.sum(dim)
    deviations = torch.where(there, values - values.nanmean(dim, keepdim=True), 0.0)
    return ((deviations**2).sum(dim) / (count - 1).clamp(min=1)).sqrt()
