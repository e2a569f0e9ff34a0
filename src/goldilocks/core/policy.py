"""What every policy is, of whichever family: parameters that are checked, state that can be saved, metrics.

Whether the rewards of a group differ, and by how much.
"""

from __future__ import annotations

import math
from abc import ABC
from typing import Any

from goldilocks.types import Group, mean_and_std


class Policy(ABC):  # noqa: B024  # each family adds its own abstract methods
    """The common base. A policy without state or metrics of its own inherits these as they are."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that changed since construction, as JSON values and numpy arrays."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # a policy without state loads nothing
        """Take up where ``state_dict`` was written."""

    def metrics(self) -> dict[str, float]:
        """What to log of this policy, under its own names."""
        return {}


MIN_STD = 1e-6  # rewards closer than this do not differ


def is_informative(group: Group) -> bool:
    """Whether the rewards differ: otherwise every advantage is zero."""
    return len(group) > 1 and mean_and_std(group.rewards)[1] > MIN_STD


def signal(group: Group) -> float:
    """Σ(r − r̄)² over the rollouts that are trained; the baseline r̄ is of all."""
    mean, _ = mean_and_std(group.rewards)
    return math.fsum((rollout.reward - mean) ** 2 for rollout in group.trained)
