"""The first process's part: the collector's loop, a decision at a time.

A decision is a round of requests to generate, or the batch to train. Everything that a decision needs travels to the
other processes as plain data, and nothing else is decided anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from goldilocks.core import Collector
from goldilocks.drive.gate import Judgement
from goldilocks.drive.refill import Refills
from goldilocks.drive.rounds import WholeGroups, places
from goldilocks.hashing import hashed
from goldilocks.trl.gate import BatchFilterGate
from goldilocks.trl.rows import Place, Row, RowStore
from goldilocks.types import Failure, Group, Request, Rollout


@dataclass(frozen=True)
class Round:
    """Requests that are generated together, and the seed of each one's visit to its prompt."""

    requests: tuple[Request, ...]
    visit_seeds: tuple[int, ...]

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


class Decisions:
    """Asks the collector, and tells it what came of each round."""

    def __init__(
        self, collector: Collector, rows: RowStore, gate: BatchFilterGate | None, *, room: int, seed: int
    ) -> None:
        """``room`` is how many rollouts a round has at most: as many as TRL generates at a time."""
        self.collector = collector
        self._rows = rows
        self._gate = gate
        self._room = room
        self._seed = seed
        self._rounds = WholeGroups(collector.allocator)
        collector.allocator = self._rounds
        self._begin_batch()

    def next(self) -> Round | Batch:
        """Return what to do now."""
        while not (requests := self._missing()):
            groups = self.collector.take()
            if self._gate is not None:
                self._refills.judge(groups, self._judgement)
            if not self.collector.owed:
                return self._batch()
        return Round(requests, tuple(map(self._visit_seed, requests)))

    def put_back(self) -> None:
        """Let the batch wait that could not be filled: a run that goes on begins it again."""
        self.collector.put_back()
        self._begin_batch()

    def observe(
        self, requests: tuple[Request, ...], rows: Sequence[Row], weights: Sequence[float], names: Sequence[str]
    ) -> None:
        """Tell the collector of each rollout of a round, in the order of the requests."""
        self._rounds.begin(requests)
        for (request, number, _), row in zip(places(requests), rows, strict=True):
            self._rounds.next(request.uid)
            self.collector.observe(self._event(request.uid, number, row, weights, names))

    def state_dict(self) -> dict[str, Any]:
        gate = {} if self._gate is None else self._gate.state_dict()
        return {"collector": self.collector.state_dict(), "gate": gate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.collector.load_state_dict(state["collector"])
        self.collector.reissue()
        if self._gate is not None and state["gate"]:
            self._gate.load_state_dict(state["gate"])

    def waiting(self) -> tuple[Place, ...]:
        """Return the rollouts whose rows a later batch may need."""
        return tuple((rollout.uid, rollout.index) for rollout in self.collector.waiting_rollouts)

    def _missing(self) -> tuple[Request, ...]:
        """Return the next round, or nothing when the batch can be taken."""
        while not self.collector.ready:
            if requests := self.collector.requests(self._room):
                return tuple(requests)
        return ()

    def _visit_seed(self, request: Request) -> int:
        return hashed(self._seed, request.prompt.key, request.prompt.index, request.visit)

    def _begin_batch(self) -> None:
        """Count refills and judgements anew; ``next`` is asked many times for one batch."""
        reason = "" if self._gate is None else self._gate.reason
        self._refills = Refills(self.collector, reason, flat=False)

    def _judgement(self, groups: Sequence[Group]) -> Judgement:
        assert self._gate is not None
        return self._gate.judge(groups, self._rows)

    def _batch(self) -> Batch:
        collector, judged = self.collector, self._refills.metrics
        self._begin_batch()
        alive = frozenset(collector.alive)
        return Batch(collector.in_hand, alive, self.waiting(), {**collector.metrics(), **judged})

    def _event(
        self, uid: str, number: int, row: Row, weights: Sequence[float], names: Sequence[str]
    ) -> Rollout | Failure:
        tokens = row.tokens
        if not tokens:
            return Failure(uid, number, "empty_response")
        # A function that returned None does not apply to this prompt: it has no value here, and NaN is not equal to it.
        metrics = {name: value for name, value in zip(names, row.rewards, strict=True) if value == value}
        return Rollout(uid, number, row.reward(weights), tokens, metrics, truncated=row.truncated)
