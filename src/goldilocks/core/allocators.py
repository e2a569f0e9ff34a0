"""Allocators: how many rollouts each prompt gets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from goldilocks.core.beliefs import Beliefs
from goldilocks.core.policy import Policy, build
from goldilocks.errors import require
from goldilocks.types import Group, Rollout, StopRule, mean_and_std

KWARGS = "goldilocks.allocator_kwargs"


class Allocator(Policy):
    """Decides how many rollouts a group should have, given the rollouts and beliefs so far."""

    @abstractmethod
    def first(self, rows: np.ndarray, beliefs: Beliefs) -> Sequence[int]:
        """Return how many rollouts to ask for at first, for each prompt of a generation batch: at least one each.

        A policy that spends one budget over many prompts plans here.
        """

    @abstractmethod
    def wanted(self, group: Group, beliefs: Beliefs) -> int:
        """Return how many rollouts this group should have, given those it has.

        More than were asked for: the difference is requested. No more than have arrived: the group is complete, and
        its rollouts in flight are cancelled.
        """

    def trained(self, group: Group, beliefs: Beliefs) -> Sequence[Rollout]:
        """Return the rollouts of a kept group to train on; its baseline comes from all of them."""
        return group.rollouts


@dataclass
class Fixed(Allocator):
    """GRPO's n."""

    n: int = 8

    def __post_init__(self) -> None:
        require(self.n >= 1, f"{KWARGS}.n", self.n, "1 or more rollouts")

    def first(self, rows: np.ndarray, beliefs: Beliefs) -> Sequence[int]:
        return [self.n] * len(rows)

    def wanted(self, group: Group, beliefs: Beliefs) -> int:
        return self.n


@dataclass
class Pilot(Allocator):
    """``n_pilot``, and ``n_commit`` more if the pilots' mean reward is inside (lo, hi), both ends excluded."""

    n_pilot: int = 4
    n_commit: int = 12
    lo: float = 0.0
    hi: float = 1.0

    def __post_init__(self) -> None:
        require(self.n_pilot >= 2, f"{KWARGS}.n_pilot", self.n_pilot, "2 or more rollouts")
        require(self.n_commit >= 1, f"{KWARGS}.n_commit", self.n_commit, "1 or more rollouts")
        require(self.lo < self.hi, f"{KWARGS}.lo", self.lo, f"a mean reward below hi={self.hi}")

    def first(self, rows: np.ndarray, beliefs: Beliefs) -> Sequence[int]:
        return [self.n_pilot] * len(rows)

    def wanted(self, group: Group, beliefs: Beliefs) -> int:
        if len(group) < self.n_pilot:
            return self.n_pilot
        mean, _ = mean_and_std(group.rewards[: self.n_pilot])
        return self.n_pilot + self.n_commit if self.lo < mean < self.hi else self.n_pilot


@dataclass
class Adaptive(Allocator):
    """First ``max(min_rollouts, 2)``, then ``rollouts_per_batch`` at a time, until ``stop`` holds, at most ``max_n``.

    A group stops at the first of its rollouts, in the order they were asked for, that satisfies ``stop``
    (``goldilocks.types.StopRule``). An easy prompt costs two rollouts. Rollouts that arrived beyond that one are not
    trained: if the first to *arrive* counted, short answers would be favoured.

    Stopping at the first success biases the mean of the trained rollouts, so baselines are taken over every rollout
    seen, also when ``max_train_n`` trains fewer.
    """

    max_n: int = 128
    rollouts_per_batch: int = 8
    min_rollouts: int = 2
    stop: StopRule = StopRule.POSITIVE
    balance: int = 2
    max_train_n: int | None = None

    def __post_init__(self) -> None:
        self.stop = StopRule.parse("adaptive_rollout.stop", self.stop)
        require(self.min_rollouts >= 1, "adaptive_rollout.min_rollouts", self.min_rollouts, "1 or more")
        chunk, least = self.rollouts_per_batch, self.opening
        require(chunk >= 1, "adaptive_rollout.rollouts_per_batch", chunk, "1 or more")
        require(self.max_n >= least, "adaptive_rollout.max_n", self.max_n, f"min_rollouts={least} or more")
        require(self.balance >= 1, "adaptive_rollout.balance", self.balance, "1 or more of each")
        fits = self.max_train_n is None or self.max_train_n >= 2
        require(fits, "adaptive_rollout.max_train_n", self.max_train_n, "2 or more, or null to train on all")

    @property
    def opening(self) -> int:
        """The first ask: a group of one rollout cannot be judged."""
        return max(self.min_rollouts, 2)

    def first(self, rows: np.ndarray, beliefs: Beliefs) -> Sequence[int]:
        return [self.opening] * len(rows)

    def wanted(self, group: Group, beliefs: Beliefs) -> int:
        seen = len(group)
        if seen < self.opening:
            return self.opening
        if self._satisfied(group, beliefs):
            return seen
        chunks = (seen - self.opening) // self.rollouts_per_batch + 1
        return min(self.opening + chunks * self.rollouts_per_batch, self.max_n)

    def _satisfied(self, group: Group, beliefs: Beliefs) -> bool:
        positives = sum(beliefs.is_positive(rollout.reward) for rollout in group.rollouts)
        if self.stop is StopRule.POSITIVE:
            return positives >= 1
        each = self.balance if self.stop is StopRule.BALANCED else 1
        return min(positives, len(group) - positives) >= each

    def trained(self, group: Group, beliefs: Beliefs) -> Sequence[Rollout]:
        """Return all, or ``max_train_n`` with both signs in their natural ratio and at least one of each present."""
        if self.max_train_n is None or len(group) <= self.max_train_n:
            return group.rollouts
        positives = [rollout for rollout in group.rollouts if beliefs.is_positive(rollout.reward)]
        negatives = [rollout for rollout in group.rollouts if not beliefs.is_positive(rollout.reward)]
        share = round(self.max_train_n * len(positives) / len(group))
        lowest = max(min(1, len(positives)), self.max_train_n - len(negatives))
        highest = min(len(positives), self.max_train_n - min(1, len(negatives)))
        many = min(max(share, lowest), highest)
        chosen = {rollout.index for rollout in positives[:many] + negatives[: self.max_train_n - many]}
        return [rollout for rollout in group.rollouts if rollout.index in chosen]


@dataclass
class Knapsack(Allocator):
    """On average ``mean_n`` rollouts a prompt, between ``min_n`` and ``max_n``, where they are worth most per token.

    N rollouts of a prompt with pass rate p are worth (1 − pᴺ − (1−p)ᴺ) · p(1−p)²: the chance that they differ, times a
    weight that prefers hard prompts. That is concave in N, so taking the best next rollout, again and again, is
    optimal.

    A generation batch may be small, so it competes also with the beliefs of the last ``memory`` prompts: a lone hard
    prompt still gets more than a lone easy one.
    """

    mean_n: int = 8
    min_n: int = 2
    max_n: int = 32
    memory: int = 256
    _recent: np.ndarray = field(default_factory=lambda: np.empty((0, 2)), init=False, repr=False)

    def __post_init__(self) -> None:
        require(self.min_n >= 2, f"{KWARGS}.min_n", self.min_n, "2 or more rollouts")
        require(self.max_n >= self.min_n, f"{KWARGS}.max_n", self.max_n, f"min_n={self.min_n} or more")
        fits = self.min_n <= self.mean_n <= self.max_n
        require(fits, f"{KWARGS}.mean_n", self.mean_n, f"between min_n={self.min_n} and max_n={self.max_n}")
        require(self.memory >= 0, f"{KWARGS}.memory", self.memory, "0 or more prompts")

    def first(self, rows: np.ndarray, beliefs: Beliefs) -> Sequence[int]:
        batch = np.column_stack([beliefs.pass_rate(rows), beliefs.expected_tokens(rows)]).astype(np.float64)
        rivals = np.concatenate([batch, self._recent])
        self._recent = rivals[: self.memory]
        return [int(n) for n in self._spend(rivals)[: len(rows)]]

    def _spend(self, rivals: np.ndarray) -> np.ndarray:
        p, tokens = rivals[:, :1], rivals[:, 1:]
        have = np.arange(self.min_n, self.max_n)  # rollouts that a prompt has; ``value`` is that of one more
        value = (p**have * (1 - p) + (1 - p) ** have * p) * p * (1 - p) ** 2 / tokens
        budget = (self.mean_n - self.min_n) * len(rivals)
        best = np.argsort(-value, axis=None, kind="stable")[:budget]
        return self.min_n + np.bincount(best // max(value.shape[1], 1), minlength=len(rivals))

    def wanted(self, group: Group, beliefs: Beliefs) -> int:
        return group.planned

    def state_dict(self) -> dict[str, Any]:
        return {"recent": self._recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = np.asarray(state["recent"], dtype=np.float64).reshape(-1, 2)


ALLOCATORS: dict[str, type[Allocator]] = {"fixed": Fixed, "adaptive": Adaptive, "pilot": Pilot, "knapsack": Knapsack}


def build_allocator(name: str, params: Mapping[str, Any] | None = None) -> Allocator:
    return build("allocator", name, params or {}, ALLOCATORS, Allocator)  # type: ignore[type-abstract]
