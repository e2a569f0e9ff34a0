"""The protocol of a filter."""

from __future__ import annotations

from abc import abstractmethod

from goldilocks.core.policy import Policy
from goldilocks.types import Group, Verdict


class Filter(Policy):
    """Judges a group when its rollouts are in."""

    @abstractmethod
    def judge(self, group: Group) -> Verdict:
        """Keep it or drop it; the reason for dropping becomes a metric. A group shown here has at least one rollout."""
