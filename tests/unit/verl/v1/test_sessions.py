"""Rollouts in the making: verl's real client and our worker's own paths, over a server that answers when told to."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from goldilocks.types import Failure
from goldilocks.verl.v1.agent_loop import SoFar, StreamingManager, StreamingWorker
from goldilocks.verl.v1.rows import FIRST, ROLLOUTS, VISIT_SEED


class Method:
    """A method of a Ray actor."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class Server:
    """Answers with as many tokens as it has been let write; ``abort_request`` ends a request with what it has."""

    def __init__(self, *, aborts: bool = True) -> None:
        self.running: dict[str, asyncio.Future[int]] = {}
        self.generate = Method(self._generate)
        self.abort_request = Method(lambda request_id: self.end(request_id, tokens=3) if aborts else None)

    async def _generate(self, request_id: str, **_: Any) -> TokenOutput:
        self.running[request_id] = asyncio.get_running_loop().create_future()
        tokens = await self.running[request_id]
        del self.running[request_id]
        return TokenOutput(token_ids=[7] * tokens, extra_fields={"global_steps": 0})

    def end(self, request_id: str, tokens: int) -> None:
        self.running[request_id].set_result(tokens)


class Balancer:
    """verl's load balancer in this process, called as an actor is."""

    def __init__(self, server: Server) -> None:
        self._balancer = GlobalRequestLoadBalancer({"server": server})

    def __getattr__(self, name: str) -> Method:
        return Method(functools.partial(self._call, getattr(self._balancer, name)))

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(method(*args, **kwargs))
        return answer


class OneAnswer:
    """An agent loop of one request."""

    def __init__(self, client: LLMServerClient) -> None:
        self._client = client

    async def run(self, sampling_params: dict, **_: Any) -> Any:
        answer = await self._client.generate(request_id="r", prompt_ids=[1], sampling_params=sampling_params)
        ids = answer.token_ids
        return SimpleNamespace(response_ids=ids, response_mask=[1] * len(ids), reward_score=None, extra_fields={})


class Worker(StreamingWorker):
    """Our worker without verl's processes: one agent loop, and a reward function that raises."""

    def __init__(self, server: Server) -> None:
        self._server = server
        rollout = {"name": "transformers", "max_num_seqs": 8, "agent": {"num_workers": 1}}
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
        self.rollout_config = SimpleNamespace(full_determinism=False, name="transformers", response_length=8)
        self._listen(LLMServerClient(self.config, Balancer(server)))

    def _agent_loop(self, name: str) -> OneAnswer:
        return OneAnswer(self.llm_client)

    async def _compute_score(self, outputs: list[Any], kwargs: dict) -> None:
        raise LookupError("the answer sheet is missing")

    async def start(self, uid: str, rollouts: int) -> asyncio.Task[None]:
        """Start so many sessions; returns when all are at the server."""
        about = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}
        prompt = a_prompt(uid, rollouts, first=0)
        before = len(self._server.running)
        task = asyncio.create_task(self._run_prompt(prompt, {}, about))
        while len(self._server.running) < before + rollouts:
            await asyncio.sleep(0)
        return task


def a_prompt(uid: str, rollouts: int, first: int) -> dict[str, Any]:
    return {"uid": uid, ROLLOUTS: rollouts, FIRST: first, VISIT_SEED: 0, "agent_name": "one", "global_steps": 0}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    async def publish(error: BaseException) -> None:
        """There is no TransferQueue to put the reason into."""

    monkeypatch.setattr("goldilocks.verl.v1.agent_loop.publish", publish)
    return Server()


def test_a_rollout_whose_reward_function_raises_is_charged_the_tokens_it_generated(server: Server) -> None:
    async def run() -> list[Any]:
        worker = Worker(server)
        task = await worker.start("g0", rollouts=1)
        server.end(next(iter(server.running)), tokens=500)
        await task
        return await worker.events()

    assert asyncio.run(run()) == [Failure("g0", 0, "LookupError", 500)]


def test_cancelled_sessions_are_aborted_and_charged_and_the_drain_waits_for_them(server: Server) -> None:
    async def run() -> list[Any]:
        worker = Worker(server)
        task = await worker.start("g0", rollouts=2)
        drained = asyncio.create_task(worker.drained(within=60))
        await asyncio.sleep(0.01)
        assert not drained.done()  # two are at the server
        await worker.cancel(["g0"])
        assert (await drained).left == 0
        await task
        return await worker.events()

    assert set(asyncio.run(run())) == {Failure("g0", 0, "cancelled", 3), Failure("g0", 1, "cancelled", 3)}


def test_a_server_that_cannot_abort_is_waited_for_and_in_the_end_said_to_run_on(server: Server) -> None:
    server = Server(aborts=False)

    async def run() -> None:
        worker = Worker(server)
        task = await worker.start("g0", rollouts=2)
        await worker.cancel(["g0"])
        assert (await worker.drained(within=0.01)).left == 2
        for request_id in list(server.running):
            server.end(request_id, tokens=1)
        assert (await worker.drained(within=60)).left == 0
        await task

    asyncio.run(run())


def test_at_any_moment_a_session_is_told_of_or_is_unfinished_with_its_answers(server: Server) -> None:
    async def run() -> tuple[SoFar, SoFar, list[Any]]:
        worker = Worker(server)
        task = await worker.start("g0", rollouts=3)
        one, two, three = server.running
        server.end(one, tokens=5)
        first = await worker.events()
        server.end(two, tokens=6)
        while not worker._events:
            await asyncio.sleep(0)
        moment, next_moment = await worker.so_far(), await worker.so_far()
        server.end(three, tokens=7)
        await task
        return moment, next_moment, [*first, *await worker.events()]

    moment, next_moment, others = asyncio.run(run())
    assert (moment.replies, [event.tokens for event in moment.events], len(moment.answers)) == (1, [6], 1)
    assert next_moment == moment._replace(events=[])
    assert [event.tokens for event in others] == [5, 7]


class Reference:
    """Of a reply: ``arrived`` says whether it can be seen yet."""

    def __init__(self, value: Any, *, arrived: bool) -> None:
        self.value, self.arrived = value, arrived


def test_a_reply_on_its_way_is_waited_for_and_comes_before_what_happened_since(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Failure("g0", 0, "lost"), Failure("g0", 1, "lost")
    unanswered = Reference(None, arrived=False)
    replies = [Reference([old], arrived=False), unanswered]
    snapshots = [SoFar(1, [new], ["answer"]), SoFar(1, [], [])]
    worker = SimpleNamespace(
        events=Method(lambda: replies.pop(0)), so_far=Method(lambda: Reference(snapshots.pop(0), arrived=True))
    )

    def get(wanted: Any) -> Any:
        assert wanted is not unanswered, "there may never be an answer"
        return [one.value for one in wanted] if isinstance(wanted, list) else wanted.value

    def wait(references: list[Reference], num_returns: int, timeout: float | None) -> Any:
        return [one for one in references if one.arrived], []

    monkeypatch.setattr("goldilocks.verl.v1.agent_loop.ray", SimpleNamespace(get=get, wait=wait))
    manager = StreamingManager.__new__(StreamingManager)
    manager.agent_loop_workers, manager._waiting, manager._replies = [worker], {}, Counter()
    assert manager.events(within=0.0) == []
    assert manager.so_far() == ([old, new], ["answer"])
    assert manager.events(within=0.0) == []
    assert manager.so_far() == ([], [])


def test_a_session_of_a_cancelled_group_makes_no_further_request(server: Server) -> None:
    async def run() -> list[Any]:
        worker = Worker(server)
        first = await worker.start("g0", rollouts=1)
        second = asyncio.create_task(
            worker._run_prompt(
                a_prompt("g0", rollouts=1, first=1),
                {},
                {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False},
            )
        )
        await worker.cancel(["g0"])  # before the second has reached the server
        await asyncio.gather(first, second)
        return await worker.events()

    events = asyncio.run(run())
    assert {(event.index, event.tokens) for event in events} == {(0, 3), (1, 0)}
