"""The balancer chooses the servers. What is cancelled is aborted there, and what pauses goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from verl.workers.rollout.llm_server import LLMServerClient
from verl_world import ABORTED, Actor, Server, VllmServer, balancer_of, client_of, one_server, start

from goldilocks.engine.verl_server.messages import TOP
from goldilocks.types import hashed
from goldilocks.verl.dispatch.client import Cancelled, StreamingClient, TurnRequest, current_session

SERVERS = {"transformers": Server, "vllm": VllmServer}


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def one_asked(server: Server, **options: Any) -> tuple[StreamingClient, asyncio.Task[Any]]:
    """Return a client of the server and its one request, which is there."""
    client = one_server(server, **options)
    task = start(client, "x", 0)
    await server.holds(1)
    return client, task


async def test_a_cancelled_group_is_aborted_at_its_server_and_the_effect_is_counted() -> None:
    server = Server()
    client = one_server(server)
    tasks = [start(client, "x", 0), start(client, "x", 1), start(client, "y", 0)]
    await settle()
    client.cancel("x")
    for task in tasks[:2]:
        with pytest.raises(Cancelled):
            await task
    assert (client.aborts.asked, client.aborts.ended, client.aborts.tokens) == (2, 2, 2 * len(ABORTED))
    assert await client.drained(0.01) == 1
    server.answer_all()
    await tasks[2]
    assert await client.drained(0.01) == 0


async def test_a_server_whose_aborts_do_nothing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(aborts=False)
    client = one_server(server)
    for turn in range(3):
        tasks = [start(client, f"x{turn}", index) for index in range(16)]
        await settle()
        client.cancel(f"x{turn}")
        server.answer_all()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (client.aborts.asked, client.aborts.ended) == (48, 0)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["none of 16 aborts ended an answer"]


async def test_of_an_engine_that_is_not_known_nothing_is_aborted() -> None:
    server = Server()
    client, task = await one_asked(server, name="trtllm")
    client.cancel("x")
    assert server.held
    server.answer_all()
    with pytest.raises(Cancelled):
        await task
    assert client.aborts.asked == 0


async def test_requests_beyond_what_a_server_takes_at_once_wait_and_may_be_cancelled_unsent() -> None:
    server = Server()
    client = one_server(server, max_num_seqs=8, workers=164)  # 984 places over 164 workers
    tasks = [start(client, "x", index) for index in range(10)]
    await settle()
    assert len(server.held) == 6
    client.cancel("x")
    assert all(isinstance(outcome, Cancelled) for outcome in await asyncio.gather(*tasks, return_exceptions=True))
    assert len(server.prompts) == server.most_held == 6


def params_of(name: str, gates: bool = False, **sampling: Any) -> dict[str, Any]:
    """Return the parameters with which a server is asked for an answer."""

    async def main() -> dict[str, Any]:
        server = SERVERS[name]()
        task = start(one_server(server, name=name, gates=gates), "x", 0, **sampling)
        await settle()
        server.answer_all()
        await task
        (params,) = server.params
        return params

    return asyncio.run(main())


@pytest.mark.parametrize(("name", "asked"), [("vllm", {TOP: True}), ("transformers", None)])
def test_gate_2_asks_vllm_for_the_largest_log_prob(name: str, asked: dict[str, bool] | None) -> None:
    assert params_of(name, gates=True).get("extra_args") == asked


@pytest.mark.parametrize(
    ("name", "stop", "text"), [("vllm", None, False), ("vllm", ["\n"], True), ("transformers", None, True)]
)
def test_vllm_makes_no_text_unless_a_stop_string_is_looked_for(name: str, stop: list[str] | None, text: bool) -> None:
    assert params_of(name, **({"stop": stop} if stop else {})).get("detokenize", True) is text


@pytest.mark.parametrize("name", ["transformers", "vllm"])
async def test_a_later_turn_draws_noise_of_its_own_and_ends_where_its_conversation_must(name: str) -> None:
    later = [*range(12)]  # the first prompt, an answer and what a tool said: 18 - 12 tokens are left
    server = SERVERS[name]()
    client = one_server(server, name=name)
    current_session.set(client.begin("x", 0))
    for prompt in ([1], later):
        task = asyncio.create_task(client.generate("x0", prompt_ids=prompt, sampling_params={"seed": 11}))
        (held,) = await server.holds(1)
        await server.abort_request(held)
        await server.holds(1)  # the rest
        server.answer_all()
        await task
    found = server.params
    assert [params.get("max_tokens") for params in found] == [None, 10 - len(ABORTED), None, 6 - len(ABORTED)]
    first, rest = found[0]["seed"], found[1]["seed"]
    if name == "transformers":  # draws by the position in the whole text
        assert {params["seed"] for params in found} == {11}
    else:
        assert (first, rest) == (11, hashed(11, len(ABORTED)))  # as of a single turn
        assert len({params["seed"] for params in found}) == 4


async def test_a_paused_session_goes_on_from_what_it_has_and_its_agent_loop_sees_one_answer() -> None:
    server = Server()
    client, task = await one_asked(server)
    assert await client.pause(within=10) == 0
    assert [(one.uid, one.index, one.tokens) for one in client.unfinished] == [("x", 0, len(ABORTED))]
    await settle()
    assert not server.held  # nothing is asked for before it goes on
    client.resume()
    await settle()
    server.answer_all()
    output = await task
    assert output.token_ids == [*ABORTED, 1, 2, 3]
    assert output.stop_reason == "completed"
    assert [params.get("max_tokens") for params in server.params] == [None, 10 - len(ABORTED)]
    assert server.prompts == [[1], [1, *ABORTED]]
    assert (client.aborts.asked, client.aborts.ended) == (1, 1)


async def test_requests_that_wait_for_a_place_when_generation_pauses_are_sent_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("goldilocks.verl.dispatch.client.ASK_AGAIN_S", 3600)  # not again on a slow machine
    server = Server()
    client = one_server(server, max_num_seqs=8, workers=164)  # 984 places over 164 workers
    tasks = [start(client, "x", index) for index in range(10)]
    await settle()
    assert await client.pause(within=10) == 0
    assert sorted(one.tokens for one in client.unfinished) == [0] * 4 + [len(ABORTED)] * 6
    assert server.aborts_asked_at_once == [6]  # a busy server answers few messages in a second
    client.resume()
    while not all(task.done() for task in tasks):
        server.answer_all()
        await settle()
    assert sorted(len(task.result().token_ids) for task in tasks) == [3] * 4 + [len(ABORTED) + 3] * 6


async def test_groups_that_are_cancelled_together_are_aborted_by_one_message_to_their_server() -> None:
    server = Server()
    client = one_server(server)
    tasks = [start(client, uid, index) for uid in "xyz" for index in range(2)]
    await server.holds(6)
    client.cancel("x", "z", "of nobody")
    ended = await asyncio.gather(*tasks[:2], *tasks[4:], return_exceptions=True)
    assert [type(one) for one in ended] == [Cancelled] * 4
    assert server.aborts_asked_at_once == [4]
    server.answer_all()
    assert [len((await task).token_ids) for task in tasks[2:4]] == [3, 3]


async def test_a_paused_session_whose_group_is_cancelled_makes_no_further_request() -> None:
    server = Server()
    client, task = await one_asked(server)
    await client.pause(within=10)
    client.cancel("x")
    assert not list(client.unfinished)
    client.resume()
    with pytest.raises(Cancelled):
        await task
    assert not server.held


async def test_a_server_that_does_not_abort_is_asked_again_and_said_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goldilocks.verl.dispatch.client.ASK_AGAIN_S", 0.01)
    server = Server(aborts=False)
    client, task = await one_asked(server)
    assert await client.pause(within=0.01) == 1
    before, pausing = len(server.asked_to_abort), asyncio.ensure_future(client.pause(within=60))
    while len(server.asked_to_abort) < before + 2:  # however long the machine takes for it
        await asyncio.sleep(0.001)
    server.answer_all()
    assert await pausing == 0
    assert len((await task).token_ids) == 3


async def test_an_abort_that_came_before_its_request_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goldilocks.verl.dispatch.client.ASK_AGAIN_S", 0.01)

    class Late(Server):
        async def abort_requests(self, request_ids: Any) -> list[str]:
            first = not self.aborts_asked_at_once
            self.aborts_asked_at_once.append(len(request_ids))
            return [] if first else [(await self.abort_request(name))["request_id"] for name in request_ids]

    client, task = await one_asked(Late())
    client.cancel("x")
    assert await client.drained(600) == 0
    with pytest.raises(Cancelled):
        await task


def test_log_probs_of_a_prompt_are_asked_for_in_the_form_that_verl_cuts() -> None:
    client = one_server(VllmServer(), name="vllm")
    assert client._without_text({"prompt_logprobs": 0}) == {"detokenize": False, "prompt_logprobs": 0}


# -- verl's client, as releases have it --------------------------------------------------------------------------------


async def acquire_by_name(self: Any, request_id: str) -> Any:
    return await self._load_balancer.acquire_server.remote(request_id=request_id)


async def acquire_by_request(self: Any, request_id: str, **about: Any) -> Any:
    assert set(about) == {"prompt_ids"}
    return await acquire_by_name(self, request_id)


def release_by_name(self: Any, server_id: str) -> None:
    self._load_balancer.release_server.remote(server_id=server_id)


def release_by_request(self: Any, server_id: str, request_id: str | None = None) -> None:
    assert request_id is not None
    release_by_name(self, server_id)


RELEASES = {"0.9.1": (acquire_by_request, release_by_request), "0.10.0.dev": (acquire_by_name, release_by_name)}


@pytest.mark.parametrize("release", RELEASES)
async def test_the_balancer_chooses_a_server_for_each_group_and_is_told_of_its_last_answer(
    monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    acquire, give_back = RELEASES[release]
    monkeypatch.setattr(LLMServerClient, "_acquire_server", acquire)
    monkeypatch.setattr(LLMServerClient, "_release_server", give_back)
    a, b = Server(), Server()
    balancer = balancer_of(a=Actor(a), b=Actor(b))
    client = client_of(balancer)
    turns = [TurnRequest(client.begin(uid, index), [1], {}) for uid in ("x", "y") for index in range(2)]
    asked = asyncio.create_task(client.ask(turns, lambda replies: None))
    (first, last), _ = await a.holds(2), await b.holds(2)
    assert balancer.subject.get_total_inflight() == 2
    for name, left in ((first, 2), (last, 1)):
        a.answer(name, [1])
        await settle()
        assert balancer.subject.get_total_inflight() == left
    b.answer_all()
    await asked
    assert (a.messages, b.messages) == ([2], [2])
    assert (balancer.calls["acquire_server"], balancer.calls["release_server"]) == (2, 2)
    assert balancer.subject.get_total_inflight() == 0
