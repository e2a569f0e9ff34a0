"""Rollouts in the making: verl's agent loop and client in our worker, over a server that answers when told to."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from verl_world import ABORTED, Server, Worker, prompt

from goldilocks.types import Failure
from goldilocks.verl.dispatch.worker import Snapshot, StreamingManager

pytestmark = pytest.mark.usefixtures("queue")


async def started(rollouts: int, *, aborts: bool = True) -> tuple[Worker, Server, list[str]]:
    """Start a group; return when all of its requests are at the server, with their names."""
    server = Server(aborts=aborts)
    worker = Worker(server, whole=False)
    await worker.start([prompt(0, n=rollouts)])
    return worker, server, await server.holds(rollouts)


async def test_a_server_that_cannot_abort_is_waited_for_and_in_the_end_said_to_run_on() -> None:
    worker, server, _ = await started(2, aborts=False)
    await worker.cancel(["g0"])
    assert (await worker.drained(within=0.01)).left == 2
    server.answer_all()
    assert (await worker.drained(within=60)).left == 0
    await worker.finish()


async def test_at_any_moment_a_session_has_an_event_or_is_unfinished_with_its_answers() -> None:
    worker, server, (one, two, three) = await started(3)
    server.answer(one, [7] * 3)
    first = await worker.events()
    server.answer(two, [7] * 4)
    while not worker._events:
        await asyncio.sleep(0)
    moment, next_moment = await worker.so_far(True), await worker.so_far(False)
    server.answer(three, [7] * 5)
    others = [*first, *await worker.finish()]
    assert (moment.replies, [event.tokens for event in moment.events], len(moment.answers)) == (1, [4], 1)
    assert next_moment == moment._replace(events=[], answers=[])
    assert [event.tokens for event in others] == [3, 5]


async def test_a_session_of_a_cancelled_group_makes_no_further_request() -> None:
    worker, server, _ = await started(1)
    await worker.start([prompt(0, n=1, first=1)])
    await worker.cancel(["g0"])  # before the second has reached the server
    events = await worker.finish()
    assert len(server.prompts) == 1
    assert [(event.index, event.tokens) for event in events] == [(0, len(ABORTED)), (1, 0)]


class Reference:
    """Stands for Ray's reference of a reply: ``arrived`` says whether it can be seen yet."""

    def __init__(self, value: Any, *, arrived: bool) -> None:
        self.value, self.arrived = value, arrived


def test_a_reply_on_its_way_is_waited_for_and_comes_before_what_happened_since(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Failure("g0", 0, "lost"), Failure("g0", 1, "lost")
    unanswered = Reference(None, arrived=False)
    replies = [Reference([old], arrived=False), unanswered]
    snapshots = [Snapshot(1, [new], ["answer"]), Snapshot(1, [], [])]
    worker = SimpleNamespace(
        events=SimpleNamespace(remote=lambda: replies.pop(0)),
        so_far=SimpleNamespace(remote=lambda with_answers: Reference(snapshots.pop(0), arrived=True)),
    )

    def get(wanted: Any) -> Any:
        assert wanted is not unanswered, "there may never be an answer"
        return [one.value for one in wanted] if isinstance(wanted, list) else wanted.value

    def wait(references: list[Reference], num_returns: int, timeout: float | None) -> Any:
        return [one for one in references if one.arrived], []

    monkeypatch.setattr("goldilocks.verl.dispatch.worker.ray", SimpleNamespace(get=get, wait=wait))
    manager = StreamingManager.__new__(StreamingManager)
    manager.agent_loop_workers, manager._waiting, manager._replies = [worker], {}, Counter()
    assert manager.events(within=0.0) == []
    assert manager.so_far(with_answers=True) == ([old, new], ["answer"])
    assert manager.events(within=0.0) == []
    assert manager.so_far(with_answers=True) == ([], [])


def test_prompts_that_come_one_by_one_are_spread_over_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refill is often of one prompt: one worker would render, grade and store them all."""
    given: list[list[Any]] = [[], [], []]
    starts = [SimpleNamespace(remote=lambda part, own=own: own.extend(part)) for own in given]
    workers = [SimpleNamespace(start=start) for start in starts]
    monkeypatch.setattr("goldilocks.verl.dispatch.worker.ray", SimpleNamespace(get=list))
    manager = StreamingManager.__new__(StreamingManager)
    manager.agent_loop_workers, manager._next = workers, 0
    for prompts in ([0], [1], [2, 3], [4, 5, 6, 7]):
        manager.start(prompts)
    assert sorted(prompt for own in given for prompt in own) == list(range(8))
    assert [len(own) for own in given] == [2, 3, 3]
