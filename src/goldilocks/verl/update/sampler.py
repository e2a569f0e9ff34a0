"""The collector's loop on verl: requests go to the agent loops, events come back, a batch is a list of keys.

Tensors stay in the TransferQueue; the payload of a rollout is its keys and tags there. What the collector lets go is
cleared from the queue once a step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from goldilocks.core import Collector
from goldilocks.drive.stopwatch import Stopwatch
from goldilocks.types import Failure, Request, Rollout
from goldilocks.verl.dispatch.failures import published_error
from goldilocks.verl.dispatch.sampling_seed import visit_seed
from goldilocks.verl.source import DatasetSource
from goldilocks.verl.store.rows import ANSWERS, FIRST, PARTITION, ROLLOUTS, VISIT_SEED, QueueRows, batch_of
from goldilocks.verl.store.unfinished import Saved, Unfinished

if TYPE_CHECKING:
    from goldilocks.verl.dispatch.manager import StreamingManager

MAX_FAILURES = 64  # in a row: it is not bad luck any more
POLL_INTERVAL = 0.05  # seconds; validation waits on verl's own replay buffer


class CollectorSampler(ReplayBuffer):
    """verl's replay buffer for validation; for training, whatever the collector takes."""

    def __init__(self, config: Any) -> None:
        sampler = config.trainer.v1.sampler
        super().__init__(
            trainer_mode="sync",
            trainer_config=OmegaConf.create(),
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
            poll_interval=POLL_INTERVAL,
        )
        self._config = config
        self.collector: Collector
        self.manager: StreamingManager
        self.rows = QueueRows(Unfinished(self._unfinished))
        self._failures = 0
        self._succeeded_at = 0.0
        self._watch = Stopwatch()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        if partition_id != PARTITION:
            return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        self.fill(global_steps, drain=False)
        groups = self.collector.take()
        self._drain()
        return batch_of(groups), {**self.manager.metrics(), **self._watch.read()}

    def fill(self, global_steps: int, *, drain: bool = True) -> None:
        """Run the loop until a batch is there to be taken. What was paused goes on."""
        if self.collector.surplus.pauses:
            self.manager.resume()
        while not self.collector.ready:
            with self._watch.timed("submit"):
                self._submit(self.collector.requests(), global_steps)
            if not self.collector.ready:
                self._observe()
        if drain:
            self._drain()

    def _drain(self) -> None:
        """Nothing is at the rollout servers afterwards: they are about to be put to sleep."""
        self._cancel()
        self._stop()
        self._observe(within=0.0)  # what the cancelled ones have cost
        with self._watch.timed("clear"):
            self.rows.retain(self.collector.alive)

    def _stop(self) -> None:
        if self.collector.surplus.pauses:
            for paused in self.manager.pause():
                self.collector.observe(paused)
        else:
            while self.collector.in_flight:
                self._observe()
        with self._watch.timed("drain"):
            self.manager.drain()

    def _submit(self, requests: list[Request], global_steps: int) -> None:
        if not requests:
            return
        source = self.collector.source
        assert isinstance(source, DatasetSource)
        self.manager.start([self._prompt(request, source, global_steps) for request in requests])

    def _prompt(self, request: Request, source: DatasetSource, global_steps: int) -> dict[str, Any]:
        """The row of the dataset, with what the agent loops need to know of the request."""
        return {
            **source.dataset[request.prompt.index],
            "uid": request.uid,
            ROLLOUTS: request.n,
            FIRST: request.first,
            VISIT_SEED: self._visit_seed(request),
            ANSWERS: self.rows.unfinished.give(request),
            "global_steps": global_steps,
        }

    def _visit_seed(self, request: Request) -> int:
        """Seed by the number of the visit to the prompt: the same whatever is generated beside it."""
        return visit_seed(self._config, request.prompt.key, request.prompt.index, request.visit)

    def _unfinished(self) -> list[Saved]:
        return self.manager.answers()

    def _observe(self, within: float | None = None) -> None:
        """Wait for something to happen, and take it in."""
        with self._watch.timed("wait"):
            events = self.manager.events(within)
        self._take_in(events)

    def _take_in(self, events: list[Rollout | Failure]) -> None:
        for event in events:
            self._failures = 0 if isinstance(event, Rollout) else self._failures + (event.reason != "cancelled")
            if self._failures >= MAX_FAILURES:
                first = published_error(self._succeeded_at)
                raise RuntimeError(f"{self._failures} rollouts failed in a row; the first said: {first}")
            if isinstance(event, Rollout):
                self._succeeded_at = time.time()
                self.rows.note(event.uid, [key for key, _ in event.payload])
            self.collector.observe(event)
        self._cancel()

    def _cancel(self) -> None:
        self.manager.cancel(self.collector.cancelled())


class NeverPausing(CollectorSampler):
    """For servers with devices of their own, which generate while the trainer trains."""

    _answers: list[Saved] | None = None

    def _stop(self) -> None:
        """Nothing stops: verl stops what is being written when it has new weights, and lets it go on."""

    def observe_all(self) -> None:
        """Take in everything that has happened up to one moment, of which the answers are saved too."""
        events, self._answers = self.manager.so_far()
        self._take_in(events)

    def _unfinished(self) -> list[Saved]:
        """Of the moment of ``observe_all``: a rollout that has ended since then is unfinished to the collector."""
        answers, self._answers = self._answers, None
        return super()._unfinished() if answers is None else answers
