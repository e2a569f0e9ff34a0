"""Allocators: how many rollouts each prompt gets.

A group is asked for in chunks. A chunk is waited for whole, then the allocator is asked again. So neither the order of
arrival nor the length of an answer decides anything, and everything that was generated for a group belongs to it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from goldilocks.core.beliefs import Beliefs
from goldilocks.core.filters import Policy, build
from goldilocks.errors import require
from goldilocks.types import Group, Rollout, StopRule, Word, mean_and_std

KWARGS = "goldilocks.allocator_kwargs"
ENOUGH = 4.0  # worth that a run has earned before it has a price


class Allocator(Policy):
    """Decides how many rollouts a group should have, given the rollouts and beliefs so far."""

    @abstractmethod
    def first(self, rows: np.ndarray, beliefs: Beliefs) -> Sequence[int]:
        """Return how many rollouts to ask for at first, for each prompt of a generation batch: at least one each.

        A policy that spends one budget over many prompts plans here.
        """

    @abstractmethod
    def wanted(self, group: Group, beliefs: Beliefs) -> int:
        """Return how many rollouts this group should have, given those it has; asked when none is on its way.

        More than it has: the difference is requested. No more: the group is complete. ``beliefs`` have learnt from
        these rollouts, so that the posterior of the prompt has them.
        """

    @property
    def most(self) -> int | None:
        """How many rollouts a group can have at most; None: as many as ``wanted`` says at any time.

        A rollout that failed too often takes a place of these.
        """
        return None

    def trained(self, group: Group, beliefs: Beliefs) -> Sequence[Rollout]:
        """Return the rollouts of a kept group to train on; its baseline comes from all of them."""
        return group.rollouts

    def learn(self, group: Group, beliefs: Beliefs) -> None:
        """Learn from a group that was judged."""

    def size(self) -> tuple[int, int]:
        """Return how many rollouts a group has at first, and how many it has once they differ.

        ``worth`` counts on both. A group counts as open, beside ``gen_batch_size``, once it was asked for the second.
        """
        return 2, 2

    def worth(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the chance that a visit to each prompt is informative, per rollout; beliefs are Beta(a, b)."""
        first, whole = self.size()
        return _best_worth(a, b, [first], whole)


def _best_worth(a: np.ndarray, b: np.ndarray, ends: Sequence[int], whole: int) -> np.ndarray:
    """Return the chance to be informative per rollout of groups that end at one of ``ends``, the best, if they agree.

    Groups whose rewards differ by then have ``whole`` rollouts.
    """
    right, wrong, best = np.ones_like(a), np.ones_like(b), np.zeros_like(a)
    for n in range(1, ends[-1] + 1):
        right = right * (a + (n - 1)) / (a + b + (n - 1))
        wrong = wrong * (b + (n - 1)) / (a + b + (n - 1))
        if n in ends:
            differ = 1 - right - wrong
            best = np.maximum(best, differ / (n + differ * (whole - n)))
    return best


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

    def size(self) -> tuple[int, int]:
        return self.n, self.n


@dataclass
class Pilot(Allocator):
    """``n_pilot``, and ``n_commit`` more if the share of passes among the pilots is inside (lo, hi), ends excluded."""

    n_pilot: int = 4
    n_commit: int = 12
    lo: float = 0.0
    hi: float = 1.0

    def __post_init__(self) -> None:
        require(self.n_pilot >= 2, f"{KWARGS}.n_pilot", self.n_pilot, "2 or more rollouts")
        require(self.n_commit >= 1, f"{KWARGS}.n_commit", self.n_commit, "1 or more rollouts")
        require(self.lo < self.hi, f"{KWARGS}.lo", self.lo, f"a share of passes below hi={self.hi}")

    def first(self, rows: np.ndarray, beliefs: Beliefs) -> Sequence[int]:
        return [self.n_pilot] * len(rows)

    def wanted(self, group: Group, beliefs: Beliefs) -> int:
        pilots = group.rollouts[: self.n_pilot]
        share = sum(map(beliefs.passed, pilots)) / len(pilots)
        return self.n_pilot + self.n_commit if self.lo < share < self.hi else self.n_pilot

    def size(self) -> tuple[int, int]:
        return self.n_pilot, self.n_pilot + self.n_commit


@dataclass
class Adaptive(Allocator):
    """First ``max(min_rollouts, 2)``, then ``rollouts_per_batch`` at a time, until ``stop`` holds, at most ``max_n``.

    ``stop`` (``goldilocks.types.StopRule``) is looked at after each chunk, and everything that was generated is
    trained. An easy prompt costs two rollouts. Stopping at a success biases the mean of the trained rollouts, so
    baselines are taken over every rollout seen, also when ``max_train_n`` trains fewer.
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

    @property
    def most(self) -> int:
        return self.max_n

    def first(self, rows: np.ndarray, beliefs: Beliefs) -> Sequence[int]:
        return [self.opening] * len(rows)

    def wanted(self, group: Group, beliefs: Beliefs) -> int:
        seen, passes = len(group), beliefs.passes(group)
        if self.stop is StopRule.POSITIVE:
            enough = passes >= 1
        else:
            enough = min(passes, seen - passes) >= (self.balance if self.stop is StopRule.BALANCED else 1)
        return seen if enough else min(seen + self.rollouts_per_batch, self.max_n)

    def trained(self, group: Group, beliefs: Beliefs) -> Sequence[Rollout]:
        """Return all, or ``max_train_n`` with both signs in their natural ratio and at least one of each present."""
        if self.max_train_n is None or len(group) <= self.max_train_n:
            return group.rollouts
        positives = [rollout for rollout in group.rollouts if beliefs.passed(rollout)]
        negatives = [rollout for rollout in group.rollouts if not beliefs.passed(rollout)]
        share = round(self.max_train_n * len(positives) / len(group))
        lowest = max(min(1, len(positives)), self.max_train_n - len(negatives))
        highest = min(len(positives), self.max_train_n - min(1, len(negatives)))
        many = min(max(share, lowest), highest)
        chosen = {rollout.index for rollout in positives[:many] + negatives[: self.max_train_n - many]}
        return [rollout for rollout in group.rollouts if rollout.index in chosen]

    def size(self) -> tuple[int, int]:
        return self.opening, self.opening


class Worth(Word):
    """What a group is worth to ``Sequential``."""

    INFORMATIVE = "informative"  # one, if its rewards differ; once they do it is filled up to n
    SIGNAL = "signal"  # Σ(r − r̄)²; it goes on while another rollout adds enough, up to n


@dataclass
class Sequential(Allocator):
    """Goes on with a group while its next rollouts are worth their price: what the run earns elsewhere for their cost.

    A group is given up where its rollouts agree and, by the posterior of its prompt, those to come are not expected to
    earn what they cost at the price. At most ``n`` rollouts; ``chunk`` at a time where the next could end the group,
    and otherwise as many as it would get whatever they turn out to be. The price is what the run has lately earned per
    token (``goldilocks.cost``): a policy that maximises worth per cost values time at the rate at which it earns.
    """

    n: int = 8
    chunk: int = 2
    worth_of: Worth = Worth.INFORMATIVE
    memory: int = 256  # groups that the price is estimated from
    _earned: float = field(default=0.0, init=False, repr=False)
    _paid: float = field(default=0.0, init=False, repr=False)
    _given_up: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.worth_of = Worth.parse(f"{KWARGS}.worth_of", self.worth_of)
        require(self.n >= 2, f"{KWARGS}.n", self.n, "2 or more rollouts")
        require(2 <= self.chunk <= self.n, f"{KWARGS}.chunk", self.chunk, f"between 2 and n={self.n}")
        require(self.memory >= 1, f"{KWARGS}.memory", self.memory, "1 or more groups")

    @property
    def price(self) -> float:
        """What the run earns for a unit of cost; 0, so that nothing is given up, until it has earned a little."""
        return self._earned / self._paid if self._earned >= ENOUGH and self._paid else 0.0

    @property
    def most(self) -> int:
        return self.n

    def first(self, rows: np.ndarray, beliefs: Beliefs) -> Sequence[int]:
        if not self.price:
            return [self.n] * len(rows)
        a, b = beliefs.posterior(rows)
        prices = self.price * beliefs.expected_cost(rows)
        asked = [
            min(self._next(right, wrong, 0, price), self._next(wrong, right, 0, price))
            for right, wrong, price in zip(a.tolist(), b.tolist(), prices.tolist(), strict=True)
        ]
        return [max(n, self.chunk) for n in asked]

    def wanted(self, group: Group, beliefs: Beliefs) -> int:
        seen, passes, row = len(group), beliefs.passes(group), group.prompt.index
        if seen >= self.n or (self.worth_of is Worth.INFORMATIVE and beliefs.differs(group)):
            return self.n
        a, b = beliefs.posterior_of(row)  # these rollouts are in it
        cost = (2 * beliefs.expected_cost_of(row) + beliefs.paid(group)) / (2 + seen)  # of a rollout of this prompt
        price = self.price * cost
        if self.worth_of is Worth.SIGNAL:
            adds = a * b / ((a + b) * (a + b + 1))  # expected p(1 − p): what one rollout adds to the signal
            return min(seen + self.chunk, self.n) if adds >= price else seen
        same, other = (a, b) if passes else (b, a)
        return self._next(same - seen, other, seen, price)

    def _next(self, same: float, other: float, seen: int, price: float) -> int:
        """Return how many rollouts to have at the next decision that may give the group up; ``seen``: give it up now.

        ``same`` and ``other`` are the Beta of the outcome that all rollouts so far have had, before they were seen.
        ``value`` is the worth of going on where they still agree, from the last chunk back. A group is always opened.
        """
        stop, value, both = self.n, 0.0, same + other
        for begin in reversed(range(seen or self.chunk, self.n, self.chunk)):
            end, agree = min(begin + self.chunk, self.n), 1.0
            for j in range(begin, end):
                agree *= (same + j) / (both + j)
            differ = (1 - agree) * (1 - price * (self.n - end))  # then the group is filled up
            value = differ + (agree * value if value > 0 else 0.0) - price * (end - begin)
            if value <= 0:
                stop = begin
        return stop

    def learn(self, group: Group, beliefs: Beliefs) -> None:
        kept = 1 - 1 / self.memory
        earned = float(beliefs.differs(group))
        if self.worth_of is Worth.SIGNAL:
            earned = len(group) * mean_and_std(group.values(beliefs.metric))[1] ** 2
        self._earned = kept * self._earned + earned
        self._paid = kept * self._paid + beliefs.paid(group)
        self._given_up += len(group) < self.n and not earned

    def size(self) -> tuple[int, int]:
        return self.chunk, self.n

    def worth(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the same where the group is given up after as many chunks as are best for the prompt."""
        return _best_worth(a, b, [*range(self.chunk, self.n, self.chunk), self.n], self.n)

    def state_dict(self) -> dict[str, Any]:
        return {"earned": self._earned, "paid": self._paid, "given_up": self._given_up}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._earned, self._paid, self._given_up = state["earned"], state["paid"], state["given_up"]

    def metrics(self) -> dict[str, float]:
        return {"allocator/price": self.price, "allocator/given_up": self._given_up}


@dataclass
class Knapsack(Allocator):
    """On average ``mean_n`` rollouts a prompt, between ``min_n`` and ``max_n``, where they are worth most per cost.

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
        batch = np.column_stack([beliefs.pass_rate(rows), beliefs.expected_cost(rows)])
        rivals = np.concatenate([batch, self._recent])
        self._recent = rivals[: self.memory]
        p, cost = rivals[:, :1], rivals[:, 1:]
        have = np.arange(self.min_n, self.max_n)  # rollouts that a prompt has; ``value`` is that of one more
        value = (p**have * (1 - p) + (1 - p) ** have * p) * p * (1 - p) ** 2 / cost
        budget = (self.mean_n - self.min_n) * len(rivals)
        best = np.argsort(-value.astype(np.float32), axis=None, kind="stable")[:budget]
        extra = np.bincount(best // max(value.shape[1], 1), minlength=len(rivals))
        return [self.min_n + int(n) for n in extra[: len(rows)]]

    def wanted(self, group: Group, beliefs: Beliefs) -> int:
        return group.planned

    def size(self) -> tuple[int, int]:
        return self.mean_n, self.mean_n

    def state_dict(self) -> dict[str, Any]:
        return {"recent": self._recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = np.asarray(state["recent"], dtype=np.float64).reshape(-1, 2)


ALLOCATORS: dict[str, type[Allocator]] = {
    "fixed": Fixed,
    "adaptive": Adaptive,
    "pilot": Pilot,
    "knapsack": Knapsack,
    "sequential": Sequential,
}


def build_allocator(name: str, params: Mapping[str, Any] | None = None) -> Allocator:
    return build("allocator", name, params or {}, ALLOCATORS, Allocator)  # type: ignore[type-abstract]
