"""The driver's side of verl's agent loops: prompts go to the workers, and each rollout comes back as an event.

The driver waits for events; it never polls. Validation goes through verl's own path.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from goldilocks.drive.stopwatch import PREFIX
from goldilocks.types import Paused
from goldilocks.verl.dispatch.aborts import IDLE_TO_SLEEP
from goldilocks.verl.dispatch.worker import Drained, Report, Snapshot, StreamingWorker
from goldilocks.verl.patch import Kind
from goldilocks.verl.store.rows import SavedAnswer
from goldilocks.verl.switch import ask_for

logger = logging.getLogger(__name__)

DRAIN_S = 300.0  # how long cancelled requests may still run: a server that cannot abort ends them itself


class StreamingManager(AgentLoopManagerTQ):
    """verl's manager over workers that report each rollout as it ends."""

    agent_loop_workers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ask_for(Kind.REPORTS)
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(StreamingWorker)
        self._next = 0  # the worker that is given prompts first
        self._waiting: dict[Any, int] = {}  # replies that have not come, each with the number of its worker
        self._replies: Counter[int] = Counter()  # that came, by worker
        self._drained: list[Drained] = []
        self._engine_s: dict[str, float] = {}
        self._rewards: dict[str, float] = {}  # what reward functions have cost since it was last asked

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Call the method of every worker; return their replies."""
        replies: list[Any] = ray.get([getattr(worker, method).remote(*args) for worker in self.agent_loop_workers])
        return replies

    def start(self, prompts: list[dict[str, Any]]) -> None:
        """Start the sessions of these prompts, spread evenly over the workers, also if they come one by one."""
        workers = self.agent_loop_workers[self._next :] + self.agent_loop_workers[: self._next]
        size = math.ceil(len(prompts) / len(workers))
        parts = [prompts[place : place + size] for place in range(0, len(prompts), size)]
        self._next = (self._next + len(parts)) % len(workers)
        ray.get([worker.start.remote(part) for worker, part in zip(workers, parts, strict=False)])

    def events(self, within: float | None = None) -> list[Report]:
        """Return the events since the last call; wait until there is one, or ``within`` seconds have passed.

        Raises if a worker died.
        """
        for number, worker in enumerate(self.agent_loop_workers):
            if number not in self._waiting.values():
                self._waiting[worker.events.remote()] = number
        ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=within)
        more, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=0)
        return [event for reference in {*ready, *more} for event in self._reply(reference)]

    def so_far(self, *, with_answers: bool) -> tuple[list[Report], list[SavedAnswer]]:
        """Return the events since the last call and, if asked, the ``answers`` of the same moment.

        Every worker is asked once, so this returns however many events go on coming.
        """
        snapshots: list[Snapshot] = self._ask("so_far", with_answers)
        events: list[Report] = []
        for number, snapshot in enumerate(snapshots):
            if snapshot.replies > self._replies[number]:  # one more is on its way, and older than the snapshot
                events += self._reply(next(one for one, worker in self._waiting.items() if worker == number))
            events += snapshot.events
        return events, [saved for snapshot in snapshots for saved in snapshot.answers]

    def _reply(self, reference: Any) -> list[Report]:
        self._replies[self._waiting.pop(reference)] += 1
        events: list[Report] = ray.get(reference)
        return events

    def pause(self) -> list[Paused]:
        """Stop all generation; return what every unfinished rollout has written."""
        return [event for paused in self._ask("pause", DRAIN_S) for event in paused]

    def resume(self) -> None:
        """Continue all paused rollouts."""
        self._ask("resume")

    def answers(self) -> list[SavedAnswer]:
        """Return the answers that unfinished rollouts can go on from."""
        return [saved for answers in self._ask("answers") for saved in answers]

    def cancel(self, uids: list[str]) -> None:
        """Abort the requests of these groups, at every worker: a group may be at several."""
        if uids:
            self._ask("cancel", uids)

    def drain(self) -> None:
        """Return when no session is at a server, or warn of those that are after ``DRAIN_S``.

        An engine that must be idle to be put to sleep is waited for without a limit: every answer has an end.
        """
        while True:
            self._drained = self._reports(DRAIN_S)
            left = sum(one.left for one in self._drained)
            if left:
                logger.warning("%d cancelled requests are still at the rollout servers after %g s", left, DRAIN_S)
            if not left or self.rollout_config.name not in IDLE_TO_SLEEP:
                return

    def metrics(self) -> dict[str, float]:
        """Return the aborts since the run began, and the seconds of the busiest worker since the last call."""
        drained, self._drained = self._drained, []
        reports: list[Drained] = drained or self._reports(0.0)
        aborts = {
            "aborts/asked": sum(one.asked for one in reports),
            "aborts/ended": sum(one.ended for one in reports),
            "aborts/tokens": sum(one.tokens for one in reports),
            "aborts/left": sum(one.left for one in drained),
        }
        seconds = sorted((name, value) for one in reports for name, value in one.seconds.items())
        return {**aborts, **dict(seconds), **self._engine_seconds(reports)}

    def rewards_spent(self) -> dict[str, float]:
        """Return what reward functions have cost since the last call, as far as the workers have reported it."""
        spent, self._rewards = self._rewards, {}
        return spent

    def _reports(self, within: float) -> list[Drained]:
        reports: list[Drained] = self._ask("drained", within)
        for one in reports:
            for name, cost in one.rewards.items():
                self._rewards[name] = self._rewards.get(name, 0) + cost
        return reports

    def _engine_seconds(self, reports: list[Drained]) -> dict[str, float]:
        """Return the seconds of the busiest server since the last call."""
        now = dict(sorted((name, value) for one in reports for name, value in one.engine_s.items()))
        spent = [value - self._engine_s.get(name, 0.0) for name, value in now.items()]
        self._engine_s |= now
        return {f"{PREFIX}engine": max(spent)} if spent else {}
