"""Roll a prompt out until it shows what is needed, or until it has had enough.

A group stops at the first of its rollouts, in the order they were asked for, that satisfies ``stop``
(``goldilocks.types.StopRule``). An easy prompt costs two rollouts. What arrived beyond that rollout is not trained:
if the first to *arrive* counted, short answers would be favoured.

Stopping at the first success biases the mean of what is trained, so baselines are taken over every rollout seen, also
when ``max_train_n`` trains fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from goldilocks.core.allocators.base import Allocator
from goldilocks.core.ledger import Ledger
from goldilocks.errors import require
from goldilocks.types import Group, Rollout, StopRule


@dataclass
class Adaptive(Allocator):
    """First ``max(min_rollouts, 2)``, then ``rollouts_per_batch`` at a time, never past ``max_n``."""

    max_n: int = 128
    rollouts_per_batch: int = 8
    min_rollouts: int = 2
    stop: StopRule = StopRule.POSITIVE
    balance: int = 2
    max_train_n: int | None = None

    def __post_init__(self) -> None:
        self.stop = StopRule.parse("adaptive_rollout.stop", self.stop)
        require(self.min_rollouts >= 1, "adaptive_rollout.min_rollouts", self.min_rollouts, "1 or more")
        require(
            self.rollouts_per_batch >= 1, "adaptive_rollout.rollouts_per_batch", self.rollouts_per_batch, "1 or more"
        )
        require(
            self.max_n >= self.opening, "adaptive_rollout.max_n", self.max_n, f"min_rollouts={self.opening} or more"
        )
        require(self.balance >= 1, "adaptive_rollout.balance", self.balance, "1 or more of each")
        fits = self.max_train_n is None or self.max_train_n >= 2
        require(fits, "adaptive_rollout.max_train_n", self.max_train_n, "2 or more, or none to train on all")

    @property
    def opening(self) -> int:
        """A group needs two rollouts before anything can be said of it."""
        return max(self.min_rollouts, 2)

    def first(self, rows: np.ndarray, ledger: Ledger) -> Sequence[int]:
        return [self.opening] * len(rows)

    def wanted(self, group: Group, ledger: Ledger) -> int:
        seen = len(group)
        if seen < self.opening:
            return self.opening
        if self._satisfied(group, ledger):
            return seen
        chunks = (seen - self.opening) // self.rollouts_per_batch + 1
        return min(self.opening + chunks * self.rollouts_per_batch, self.max_n)

    def _satisfied(self, group: Group, ledger: Ledger) -> bool:
        positives = sum(ledger.is_positive(rollout.reward) for rollout in group.rollouts)
        if self.stop is StopRule.POSITIVE:
            return positives >= 1
        each = self.balance if self.stop is StopRule.BALANCED else 1
        return min(positives, len(group) - positives) >= each

    def trained(self, group: Group, ledger: Ledger) -> Sequence[Rollout]:
        """All, or ``max_train_n`` with both signs in their natural ratio, at least one of each that is there."""
        if self.max_train_n is None or len(group) <= self.max_train_n:
            return group.rollouts
        positives = [rollout for rollout in group.rollouts if ledger.is_positive(rollout.reward)]
        negatives = [rollout for rollout in group.rollouts if not ledger.is_positive(rollout.reward)]
        share = round(self.max_train_n * len(positives) / len(group))
        lowest = max(min(1, len(positives)), self.max_train_n - len(negatives))
        highest = min(len(positives), self.max_train_n - min(1, len(negatives)))
        many = min(max(share, lowest), highest)
        chosen = {rollout.index for rollout in positives[:many] + negatives[: self.max_train_n - many]}
        return [rollout for rollout in group.rollouts if rollout.index in chosen]
