"""What the first process decides, as plain data that travels to the others: a round to generate, a batch to train."""

from __future__ import annotations

from dataclasses import dataclass

from goldilocks.drive.backend import places
from goldilocks.drive.driver import Driver
from goldilocks.drive.rows import Place
from goldilocks.hashing import hashed
from goldilocks.types import Group, Request


@dataclass(frozen=True)
class Round:
    """Requests that are generated together, and the seed of each one's visit to its prompt."""

    requests: tuple[Request, ...]
    visit_seeds: tuple[int, ...]

    @classmethod
    def of(cls, requests: tuple[Request, ...], seed: int) -> Round:
        """Return a round; ``seed`` is the run's."""
        prompts = ((request.prompt.key, request.prompt.index, request.visit) for request in requests)
        return cls(requests, tuple(hashed(seed, *prompt) for prompt in prompts))

    @property
    def seeds(self) -> list[int]:
        """The seed of every rollout: a function of the run's seed, the prompt, the visit and the rollout's number."""
        return [hashed(self.visit_seeds[place], number) for _, number, place in places(self.requests)]


@dataclass(frozen=True)
class Batch:
    """The groups to train; ``waiting`` are the rollouts that a later batch may need, ``alive`` their groups."""

    groups: tuple[Group, ...]
    alive: frozenset[str]
    waiting: tuple[Place, ...]
    metrics: dict[str, float]

    @classmethod
    def of(cls, driver: Driver) -> Batch:
        """Return the batch in hand."""
        collector = driver.collector
        waiting = tuple((rollout.uid, rollout.index) for rollout in collector.waiting_rollouts)
        return cls(collector.in_hand, frozenset(collector.alive), waiting, driver.metrics())
