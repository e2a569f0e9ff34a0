"""Whether the rewards of a group differ, and by how much."""

from __future__ import annotations

import math

from goldilocks.types import Group, mean_and_std

MIN_STD = 1e-6  # rewards closer than this do not differ


def is_informative(group: Group) -> bool:
    """Whether the rewards differ: otherwise every advantage is zero."""
    return len(group) > 1 and mean_and_std(group.rewards)[1] > MIN_STD


def signal(group: Group) -> float:
    """Σ(r − r̄)² over the rollouts that are trained; the baseline r̄ is of all."""
    mean, _ = mean_and_std(group.rewards)
    return math.fsum((rollout.reward - mean) ** 2 for rollout in group.trained)
