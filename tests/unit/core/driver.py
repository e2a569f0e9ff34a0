"""A faulty engine for the properties: everything it does is a function of its seed, its tick and what it was asked."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct
from typing import Any

from goldilocks.core import Collector
from goldilocks.types import Failure, Paused, Rollout

MAX_TOKENS = 40
MOST_TURNS = 3_000
FOUR_WORDS = Struct("<4I")


@dataclass
class FaultyEngine:
    """Completes rollouts in random order; some fail, some come twice, some come after they were cancelled."""

    seed: int
    slots: int = 48
    failure_rate: float = 0.1
    duplicate_rate: float = 0.1
    late_rate: float = 0.3
    tick: int = 0
    pending: list[list[Any]] = field(default_factory=list)
    delivered: list[list[Any]] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)  # by paused rollouts

    @property
    def free(self) -> int:
        return max(self.slots - len(self.pending), 0)

    def submit(self, request: Any) -> None:
        self.pending += [[request.uid, request.first + i, request.prompt.index] for i in range(request.n)]

    def step(self) -> list[Rollout | Failure]:
        self.tick += 1
        rng = random.Random(f"{self.seed} {self.tick}")
        rng.shuffle(self.pending)
        count = rng.randint(1, max(1, len(self.pending) // 2))
        done, self.pending = self.pending[:count], self.pending[count:]
        events = [self.outcome(*item) for item in done]
        if self.delivered and rng.random() < self.duplicate_rate:
            events.append(self.outcome(*rng.choice(self.delivered)))
        self.delivered = (self.delivered + done)[-20:]
        return events

    def abort(self, uid: str) -> None:
        """Most of what is aborted never comes; some was on its way already."""
        rng = random.Random(f"{self.seed} {uid}")
        self.pending = [item for item in self.pending if item[0] != uid or rng.random() < self.late_rate]

    def pause(self) -> list[Paused]:
        """Everything stops, having written some more."""
        rng = random.Random(f"{self.seed} {self.tick} pause")
        events = []
        for uid, index, prompt in sorted(self.pending):
            before, most = self.written.get(f"{uid}/{index}", 0), self.outcome(uid, index, prompt).tokens
            self.written[f"{uid}/{index}"] = tokens = rng.randint(before, most)
            events.append(Paused(uid, index, tokens))
        return events

    def outcome(self, uid: str, index: int, prompt: int) -> Rollout | Failure:
        length, failing, lost, right = uniforms(f"{self.seed} {uid} {index}")
        tokens = 1 + int(length * MAX_TOKENS)
        if failing < self.failure_rate:
            if lost < 0.5:
                return Failure(uid, index, "lost", tokens=tokens)
            return Rollout(uid, index, reward=float("nan"), tokens=tokens)
        reward = float(right < (prompt % 11) / 10)
        return Rollout(uid, index, reward, tokens, metrics={"acc": reward}, truncated=tokens > 35)


def uniforms(name: str) -> list[float]:
    """Four numbers in [0, 1) that are a function of the name; to seed a ``Random`` takes five times as long."""
    return [word / 2**32 for word in FOUR_WORDS.unpack(blake2b(name.encode(), digest_size=FOUR_WORDS.size).digest())]


@dataclass
class Log:
    """What the collector decided, in order."""

    decisions: list[Any] = field(default_factory=list)
    batches: list[Any] = field(default_factory=list)


def turn(collector: Collector, engine: FaultyEngine, log: Log) -> None:
    """One turn of the loop in the collector's docstring."""
    for request in collector.requests(room=engine.free):
        log.decisions.append(["ask", request.uid, request.prompt.index, request.n, request.first, request.visit])
        engine.submit(request)
    for event in engine.step():
        collector.observe(event)
        collector.accounts.check()
    drop_cancelled(collector, engine, log)


def drop_cancelled(collector: Collector, engine: FaultyEngine, log: Log) -> None:
    for uid in collector.cancelled():
        log.decisions.append(["cancel", uid])
        engine.abort(uid)


def take(collector: Collector, engine: FaultyEngine, log: Log) -> Any:
    batch = collector.take()
    log.decisions.append(["take", *(group.uid for group in batch)])
    log.batches.append(batch)
    drop_cancelled(collector, engine, log)
    if collector.surplus.pauses:
        for event in engine.pause():
            collector.observe(event)
            collector.accounts.check()
    return batch


def train(collector: Collector, engine: FaultyEngine, log: Log) -> Any:
    """Fill one batch and take it."""
    begun = engine.tick
    while not collector.ready:
        turn(collector, engine, log)
        assert engine.tick - begun < MOST_TURNS, "there is no end to this step"
    return take(collector, engine, log)


def run(collector: Collector, engine: FaultyEngine, steps: int) -> Log:
    """Train ``steps`` batches."""
    log = Log()
    for _ in range(steps):
        train(collector, engine, log)
    return log
