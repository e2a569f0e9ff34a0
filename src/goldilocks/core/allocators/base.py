"""The protocol of an allocator: two questions, one when prompts are chosen, one whenever a rollout arrives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from goldilocks.core.ledger import Ledger
from goldilocks.core.policy import Policy
from goldilocks.types import Group, Rollout


class Allocator(Policy):
    """Says how many rollouts a group should have, given what is known so far."""

    @abstractmethod
    def first(self, rows: np.ndarray, ledger: Ledger) -> Sequence[int]:
        """How many rollouts to ask for at first, for each prompt of a generation batch: at least one each.

        This is where a policy that spends one budget over many prompts makes its plan.
        """

    @abstractmethod
    def wanted(self, group: Group, ledger: Ledger) -> int:
        """How many rollouts this group should have, given those it has.

        More than were asked for: the difference is requested. No more than have arrived: the group is complete, and
        what is still in flight is cancelled.
        """

    def trained(self, group: Group, ledger: Ledger) -> Sequence[Rollout]:
        """The rollouts of a kept group to train on; its baseline comes from all of them."""
        return group.rollouts
