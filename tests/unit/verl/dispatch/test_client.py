"""The balancer chooses among several servers; a single one is asked for once a wave. What is cancelled is aborted."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from PIL import Image
from ray import cloudpickle
from verl.workers.rollout.llm_server import LLMServerClient
from verl_world import ABORTED, VERSION, Actor, Server, VllmServer, balancer_of, client_of, written

from goldilocks.engine.engine import Generation
from goldilocks.hashing import hashed
from goldilocks.verl.dispatch.client import Cancelled, StreamingClient, current_session, taken_by
from goldilocks.verl.dispatch.failures import reason
from goldilocks.verl.dispatch.servers import Gathered
from goldilocks.verl.dispatch.session import Reply, TurnRequest
from goldilocks.verl.fields import TOP

SERVERS = {"transformers": Server, "vllm": VllmServer}


def named(*servers: str) -> Actor:
    """Return verl's load balancer over servers that no test sends a request to."""
    return balancer_of(**{name: f"handle of {name}" for name in servers})


async def request(client: StreamingClient, request_id: str) -> str:
    server_id, handle = await client._acquire_server(request_id)
    assert handle == f"handle of {server_id}"
    await asyncio.sleep(0)
    client._release_server(server_id, request_id=request_id)
    return server_id


async def served_by(client: StreamingClient, *requests: int) -> list[str]:
    return await asyncio.gather(*(request(client, str(number)) for number in range(*requests)))


def test_the_only_server_is_asked_for_once_for_all_prompts() -> None:
    balancer = named("a")
    client = client_of(balancer)

    async def main() -> None:
        assert await served_by(client, 20) == ["a"] * 20
        assert balancer.calls["acquire_server"] == 1
        client.refresh_servers()
        await served_by(client, 20)
        assert balancer.calls == {**balancer.calls, "get_all_servers": 2, "acquire_server": 1}
        balancer.subject.remove_servers(["a"])
        balancer.subject.add_servers({"b": "handle of b"})
        client.refresh_servers()
        assert await served_by(client, 20) == ["b"] * 20

    asyncio.run(main())
    assert balancer.calls["acquire_server"] == 2
    assert balancer.subject.get_inflight_count("b") == 0


def test_of_two_servers_the_balancer_chooses_for_every_request() -> None:
    balancer = named("a", "b")
    client = client_of(balancer)

    served = asyncio.run(served_by(client, 20))
    assert balancer.calls["acquire_server"] == 20
    assert served.count("a") == served.count("b") == 10
    assert balancer.subject.get_inflight_count("a") == balancer.subject.get_inflight_count("b") == 0


def test_a_server_that_comes_is_used_for_the_next_prompts() -> None:
    balancer = named("a")
    client = client_of(balancer)

    async def main() -> set[str]:
        await request(client, "0")
        balancer.subject.add_servers({"b": "handle of b"})
        client.refresh_servers()
        return set(await served_by(client, 1, 21))

    assert asyncio.run(main()) == {"a", "b"}


def test_no_server_is_what_verl_says_it_is() -> None:
    with pytest.raises(RuntimeError, match="No available servers"):
        asyncio.run(request(client_of(named()), "0"))


def one_server(server: Server, **options: Any) -> StreamingClient:
    return client_of(balancer_of(a=Actor(server)), **options)


def start(client: StreamingClient, uid: str, index: int, **params: Any) -> asyncio.Task[Any]:
    async def run() -> Any:
        session = client.begin(uid, index)
        current_session.set(session)
        try:
            asked = {"logprobs": True, **params}
            return await client.generate(f"{uid}{index}", prompt_ids=[1], sampling_params=asked)
        finally:
            client.end(session)

    return asyncio.create_task(run())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Gone(Server):
    """A server whose process has ended."""

    async def _answered(self, *_: Any) -> Generation:
        raise RuntimeError("the server is gone")


@pytest.mark.parametrize("with_session", [True, False])
def test_a_new_server_under_the_name_of_one_that_is_gone_is_asked(with_session: bool) -> None:
    """By the next request of the same prompts too: those of a rollout with tools come one after another."""
    balancer = balancer_of(a=Actor(Gone()))
    client = client_of(balancer)

    def asked(index: int) -> Any:
        if with_session:
            return start(client, "x", index, seed=1)
        return client.generate(f"x{index}", prompt_ids=[1], sampling_params={"seed": 1})

    async def main() -> None:
        with pytest.raises(RuntimeError, match="gone"):
            await asked(0)
        balancer.subject.remove_servers(["a"])
        balancer.subject.add_servers({"a": Actor(Server(lambda name, prompt, seed: written(name, [3, 4])))})
        for index in range(1, 4):
            assert (await asked(index)).token_ids == [3, 4]

    asyncio.run(main())
    assert balancer.calls["acquire_server"] == 2
    assert balancer.subject.get_total_inflight() == 0


def test_a_cancelled_group_is_aborted_at_its_server_and_the_effect_is_counted() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_a_server_whose_aborts_do_nothing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> StreamingClient:
        server = Server(aborts=False)
        client = one_server(server)
        for turn in range(3):
            tasks = [start(client, f"x{turn}", index) for index in range(16)]
            await settle()
            client.cancel(f"x{turn}")
            server.answer_all()
            await asyncio.gather(*tasks, return_exceptions=True)
        return client

    client = asyncio.run(main())
    assert (client.aborts.asked, client.aborts.ended) == (48, 0)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["none of 16 aborts ended an answer"]


def test_of_an_engine_that_is_not_known_nothing_is_aborted() -> None:
    async def main() -> None:
        server = Server()
        client = one_server(server, name="trtllm")
        task = start(client, "x", 0)
        await settle()
        client.cancel("x")
        assert server.held
        server.answer_all()
        with pytest.raises(Cancelled):
            await task
        assert client.aborts.asked == 0

    asyncio.run(main())


def test_requests_beyond_what_a_server_takes_at_once_wait_and_may_be_cancelled_unsent() -> None:
    async def main() -> None:
        server = Server()
        client = one_server(server, max_num_seqs=8, workers=164)  # 984 places over 164 workers
        tasks = [start(client, "x", index) for index in range(10)]
        await settle()
        assert len(server.held) == 6
        client.cancel("x")
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, Cancelled) for outcome in outcomes)
        assert len(server.prompts) == server.most_held == 6

    asyncio.run(main())


@pytest.mark.parametrize("name", SERVERS)
def test_messages_beyond_what_a_server_takes_at_once_wait_and_may_be_cancelled_unsent(name: str) -> None:
    replies: list[Reply] = []

    async def main() -> int:
        server = SERVERS[name]()
        client = one_server(server, name=name, max_num_seqs=8, workers=164)  # 984 places over 164 workers
        groups = [[TurnRequest(client.begin(f"x{uid}", index), [1], {}) for index in range(2)] for uid in range(10)]
        messages = [asyncio.create_task(client.ask(turns, replies.extend)) for turns in groups]
        await server.holds(12)
        await settle()
        client.cancel(*(f"x{uid}" for uid in range(10)))
        await asyncio.gather(*messages)
        assert await client.drained(60) == 0
        return len(server.prompts)

    assert asyncio.run(main()) == 12  # six messages of two
    assert [type(reply.outcome) for reply in replies].count(Cancelled) == 8


@pytest.mark.parametrize(("name", "asked"), [("vllm", {TOP: True}), ("transformers", None)])
def test_gate_2_asks_vllm_for_the_largest_log_prob(name: str, asked: dict[str, bool] | None) -> None:
    async def main() -> list[dict[str, Any]]:
        server = SERVERS[name]()
        client = one_server(server, name=name, gates=True)
        task = start(client, "x", 0)
        await settle()
        server.answer_all()
        await task
        return server.params

    assert [params.get("extra_args") for params in asyncio.run(main())] == [asked]


@pytest.mark.parametrize(
    ("name", "stop", "text"), [("vllm", None, False), ("vllm", ["\n"], True), ("transformers", None, True)]
)
def test_vllm_makes_no_text_unless_a_stop_string_is_looked_for(name: str, stop: list[str] | None, text: bool) -> None:
    async def main() -> list[dict[str, Any]]:
        server = SERVERS[name]()
        client = one_server(server, name=name)
        task = start(client, "x", 0, **({"stop": stop} if stop else {}))
        await settle()
        server.answer_all()
        await task
        return server.params

    assert [params.get("detokenize", True) for params in asyncio.run(main())] == [text]


@pytest.mark.parametrize("name", ["transformers", "vllm"])
def test_a_later_turn_draws_noise_of_its_own_and_ends_where_its_conversation_must(name: str) -> None:
    later = [*range(12)]  # the first prompt, an answer and what a tool said: 18 - 12 tokens are left

    async def main() -> list[dict[str, Any]]:
        server = SERVERS[name]()
        client = one_server(server, name=name)
        current_session.set(client.begin("x", 0))
        for prompt in ([1], later):
            asked = client.generate("x0", prompt_ids=prompt, sampling_params={"seed": 11})
            task = asyncio.create_task(asked)
            (held,) = await server.holds(1)
            await server.abort_request(held)
            await server.holds(1)  # the rest
            server.answer_all()
            await task
        return server.params

    found = asyncio.run(main())
    assert [params.get("max_tokens") for params in found] == [None, 10 - len(ABORTED), None, 6 - len(ABORTED)]
    first, rest = found[0]["seed"], found[1]["seed"]
    if name == "transformers":  # draws by the position in the whole text
        assert {params["seed"] for params in found} == {11}
    else:
        assert (first, rest) == (11, hashed(11, len(ABORTED)))  # as of a single turn
        assert len({params["seed"] for params in found}) == 4


def test_a_paused_session_goes_on_from_what_it_has_and_its_agent_loop_sees_one_answer() -> None:
    async def main() -> tuple[Any, Server, StreamingClient]:
        server = Server()
        client = one_server(server)
        task = start(client, "x", 0)
        await settle()
        assert await client.pause(within=10) == 0
        assert [(one.uid, one.index, one.tokens) for one in client.unfinished] == [("x", 0, len(ABORTED))]
        await settle()
        assert not server.held  # nothing is asked for before it goes on
        client.resume()
        await settle()
        server.answer_all()
        return await task, server, client

    output, server, client = asyncio.run(main())
    assert output.token_ids == [*ABORTED, 1, 2, 3]
    assert output.stop_reason == "completed"
    assert [params.get("max_tokens") for params in server.params] == [None, 10 - len(ABORTED)]
    assert server.prompts == [[1], [1, *ABORTED]]
    assert (client.aborts.asked, client.aborts.ended) == (1, 1)


def test_requests_that_wait_for_a_place_when_generation_pauses_are_sent_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("goldilocks.verl.dispatch.client.ASK_AGAIN_S", 3600)  # not again on a slow machine

    async def main() -> list[int]:
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
        return sorted(len(task.result().token_ids) for task in tasks)

    assert asyncio.run(main()) == [3] * 4 + [len(ABORTED) + 3] * 6


def test_groups_that_are_cancelled_together_are_aborted_by_one_message_to_their_server() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_a_paused_session_whose_group_is_cancelled_makes_no_further_request() -> None:
    async def main() -> None:
        server = Server()
        client = one_server(server)
        task = start(client, "x", 0)
        await settle()
        await client.pause(within=10)
        client.cancel("x")
        assert not list(client.unfinished)
        client.resume()
        with pytest.raises(Cancelled):
            await task
        assert not server.held

    asyncio.run(main())


def test_a_server_that_does_not_abort_is_asked_again_and_said_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goldilocks.verl.dispatch.client.ASK_AGAIN_S", 0.01)

    async def main() -> None:
        server = Server(aborts=False)
        client = one_server(server)
        task = start(client, "x", 0)
        await settle()
        assert await client.pause(within=0.01) == 1
        before, pausing = len(server.asked_to_abort), asyncio.ensure_future(client.pause(within=60))
        while len(server.asked_to_abort) < before + 2:  # however long the machine takes for it
            await asyncio.sleep(0.001)
        server.answer_all()
        assert await pausing == 0
        assert len((await task).token_ids) == 3

    asyncio.run(main())


# -- many requests in one message to vLLM ------------------------------------------------------------------------------


def test_requests_of_one_moment_and_their_rests_after_a_pause_are_one_message_each_to_vllm() -> None:
    async def main() -> list[Any]:
        server = VllmServer()
        client = one_server(server, name="vllm")
        tasks = [start(client, "x", index) for index in range(6)]
        first, *_ = await server.holds(6)
        server.answer(first, [1])
        await tasks[0]
        assert await client.pause(within=60) == 0
        client.resume()
        await server.holds(5)
        assert server.asked_at_once == [6, 5]
        assert server.aborts_asked_at_once == [5]
        server.answer_all()
        return await asyncio.gather(*tasks)

    outputs = asyncio.run(main())
    assert [output.token_ids for output in outputs] == [[1]] + [[*ABORTED, 1, 2, 3]] * 5
    assert [len(output.log_probs) for output in outputs] == [1] + [5] * 5


@pytest.mark.parametrize("many", [True, False], ids=["one message", "a call each"])
def test_turns_of_single_turn_rollouts_ask_vllm_for_the_same_as_other_requests(
    many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goldilocks.verl.dispatch.client.takes_many", lambda server: many)
    replies: list[Reply] = []

    async def main() -> list[dict[str, Any]]:
        server = VllmServer()
        client = one_server(server, name="vllm", gates=True)
        turns = [TurnRequest(client.begin("x", index), [1], {"logprobs": True}) for index in range(3)]
        asked = asyncio.create_task(client.ask(turns, replies.extend))
        await server.holds(3)
        client.cancel("x")
        await asked
        assert server.asked_at_once == ([3] if many else [])
        assert (client.aborts.asked, client.aborts.ended) == (3, 3)
        other = start(client, "y", 0)
        await server.holds(1)
        server.answer_all()
        await other
        return server.params

    *turns, other = asyncio.run(main())
    assert turns == [other] * 3
    assert [reply.extra_fields["max_global_steps"] for reply in replies] == [VERSION] * 3
    assert [len(reply.extra_fields["top_log_probs"]) for reply in replies] == [len(ABORTED)] * 3


def test_a_request_that_vllm_refuses_fails_alone_with_its_traceback() -> None:
    class Unsendable(ValueError):
        def __init__(self, name: str, reason: str) -> None:
            super().__init__(f"{name}: {reason}")

    class Refusing(VllmServer):
        async def generate(self, prompt_ids: Any, sampling_params: Any, request_id: str, **_: Any) -> Any:
            if len(self.prompts) == 1:
                self.prompts.append(prompt_ids)
                raise Unsendable("the prompt", "too long")
            return await super().generate(prompt_ids, sampling_params, request_id)

    async def main() -> list[Any]:
        server = Refusing()
        client = one_server(server, name="vllm")
        tasks = [start(client, "x", index) for index in range(3)]
        await server.holds(2)
        server.answer_all()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, refused, last = asyncio.run(main())
    assert first.token_ids == last.token_ids == [1, 2, 3]
    assert type(refused) is RuntimeError  # what cannot be pickled is named
    assert str(refused) == "Unsendable: the prompt: too long"
    assert "in generate" in str(refused.__cause__)  # which every Python prints; notes are printed since 3.11


@pytest.mark.parametrize("turns", [True, False], ids=["turns", "requests"])
def test_the_place_of_a_failure_in_vllm_is_the_servers(turns: bool) -> None:
    class Refusing(VllmServer):
        async def generate(self, prompt_ids: Any, sampling_params: Any, request_id: str, **_: Any) -> Any:
            raise ValueError("too long")

    async def main() -> BaseException:
        client = one_server(Refusing(), name="vllm")
        if not turns:
            return (await asyncio.gather(start(client, "x", 0), return_exceptions=True))[0]
        replies: list[Reply] = []
        await client.ask([TurnRequest(client.begin("x", 0), [1], {})], replies.extend)
        return replies[0].outcome

    line = Refusing.generate.__code__.co_firstlineno + 1
    assert reason(asyncio.run(main())) == f"ValueError: too long ({__file__}:{line})"


class Wire(Actor):
    """An actor whose messages are pickled, as Ray's are: there and back."""

    def _call(self, name: str, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        args, kwargs = copied((args, kwargs))
        return asyncio.ensure_future(self._pickled(super()._call(name, *args, **kwargs)))

    async def _pickled(self, reply: asyncio.Future[Any]) -> Any:
        return copied(await reply)


def copied(message: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(message))


@pytest.mark.parametrize("turns", [True, False], ids=["turns", "requests"])
def test_a_request_or_an_answer_that_cannot_be_pickled_fails_alone(turns: bool) -> None:
    class Locked(VllmServer):
        async def generate(self, prompt_ids: Any, sampling_params: Any, request_id: str, **_: Any) -> Any:
            output = await super().generate(prompt_ids, sampling_params, request_id)
            if sampling_params["seed"] == 1:
                output.extra_fields["lock"] = threading.Lock()
            return output

    async def main() -> list[Any]:
        server = Locked(lambda name, prompt, seed: written(name, [1, 2, 3]))
        client = client_of(balancer_of(a=Wire(server)), name="vllm")
        params = [{"seed": 0}, {"seed": 1}, {"seed": 2, "lock": threading.Lock()}, {"seed": 3}]
        replies: list[Reply] = []
        if turns:
            sent = [TurnRequest(client.begin("x", index), [1], own) for index, own in enumerate(params)]
            tasks = [asyncio.create_task(client.ask(sent, replies.extend))]
        else:
            tasks = [start(client, "x", index, **own) for index, own in enumerate(params)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return [one.outcome for turn in sent for one in replies if one.turn is turn] if turns else found

    first, unsent, unread, last = asyncio.run(main())
    assert first.token_ids == last.token_ids == [1, 2, 3]
    for error in (unsent, unread):
        assert isinstance(error, Exception)
        assert "cannot pickle '_thread.lock' object" in str(error)


def test_a_request_that_is_cancelled_inside_vllm_fails_and_is_not_waited_for() -> None:
    class Cancelling(VllmServer):
        async def generate(self, prompt_ids: Any, sampling_params: Any, request_id: str, **_: Any) -> Any:
            raise asyncio.CancelledError

    async def main() -> list[Any]:
        client = one_server(Cancelling(), name="vllm")
        outcomes = await asyncio.gather(*(start(client, "x", index) for index in range(2)), return_exceptions=True)
        assert await client.drained(60) == 0
        return outcomes

    outcomes = asyncio.run(main())
    assert [str(error) for error in outcomes] == ["the server cancelled the request: CancelledError()"] * 2


def test_what_nobody_waits_for_any_more_is_not_sent_to_vllm() -> None:
    async def main() -> list[int]:
        server = VllmServer()
        handle = Gathered(Actor(server))
        answers = [handle.generate.remote(request_id=f"r{i}", prompt_ids=[1], sampling_params={}) for i in range(2)]
        answers[0].cancel()
        await server.holds(1)
        server.answer_all()
        await answers[1]
        return server.asked_at_once

    assert asyncio.run(main()) == [1]


def test_an_abort_that_came_before_its_request_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goldilocks.verl.dispatch.client.ASK_AGAIN_S", 0.01)

    class Late(Server):
        async def abort_requests(self, request_ids: Any) -> list[str]:
            first = not self.aborts_asked_at_once
            self.aborts_asked_at_once.append(len(request_ids))
            return [] if first else [(await self.abort_request(name))["request_id"] for name in request_ids]

    async def main() -> None:
        server = Late()
        client = one_server(server)
        task = start(client, "x", 0)
        await server.holds(1)
        client.cancel("x")
        assert await client.drained(600) == 0
        with pytest.raises(Cancelled):
            await task

    asyncio.run(main())


def test_log_probs_of_a_prompt_are_asked_for_in_the_form_that_verl_cuts() -> None:
    client = one_server(VllmServer(), name="vllm")
    asked = client._unread({"prompt_logprobs": 0})
    assert asked == {"detokenize": False, "prompt_logprobs": 0}


def test_a_vllm_server_that_dies_fails_all_that_wait_for_it() -> None:
    class Dying(VllmServer):
        async def more_answers(self, batch: str) -> Any:
            answers = await super().more_answers(batch)
            if len(self.held) < 2:
                raise ConnectionError("the actor died")
            return answers

    async def main() -> list[Any]:
        server = Dying()
        client = one_server(server, name="vllm")
        tasks = [start(client, "x", index) for index in range(3)]
        names = await server.holds(3)
        server.answer(names[0], [1])
        await tasks[0]
        server.answer(names[1], [1])
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert await client.drained(60) == 0
        return outcomes

    first, *others = asyncio.run(main())
    assert first.token_ids == [1]
    assert [type(other) for other in others] == [ConnectionError] * 2


def test_a_request_with_an_image_goes_to_vllm_by_itself() -> None:
    async def main() -> list[int]:
        server = VllmServer()
        client = one_server(server, name="vllm")
        current_session.set(client.begin("x", 0))
        asked = client.generate("x0", prompt_ids=[1], sampling_params={}, image_data=[Image.new("L", (2, 2), 0)])
        task = asyncio.create_task(asked)
        await server.holds(1)
        server.answer_all()
        await task
        return server.asked_at_once

    assert asyncio.run(main()) == []


# -- verl's client, as releases have it --------------------------------------------------------------------------------


async def acquire_by_name(self: Any, request_id: str) -> Any:
    return await self._load_balancer.acquire_server.remote(request_id=request_id)


async def acquire_by_request(self: Any, request_id: str, **about: Any) -> Any:
    assert set(about) <= {"prompt_ids"}
    return await acquire_by_name(self, request_id)


def release_by_name(self: Any, server_id: str) -> None:
    self._load_balancer.release_server.remote(server_id=server_id)


def release_by_request(self: Any, server_id: str, request_id: str | None = None) -> None:
    assert request_id is not None
    release_by_name(self, server_id)


def test_what_a_function_has_no_parameter_for_is_left_out() -> None:
    def short(server_id: str) -> None: ...

    def long(server_id: str, request_id: str | None = None) -> None: ...

    def free(server_id: str, **more: Any) -> None: ...

    given = {"request_id": "r", "prompt_ids": [1]}
    assert taken_by(short, **given) == {}
    assert taken_by(long, **given) == {"request_id": "r"}
    assert taken_by(free, **given) == given


RELEASES = {"0.9.1": (acquire_by_request, release_by_request), "0.10.0.dev": (acquire_by_name, release_by_name)}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("names_the_request", [True, False])
def test_the_balancer_is_told_of_its_own_requests_alone_whatever_verls_client_takes(
    monkeypatch: pytest.MonkeyPatch, release: str, names_the_request: bool
) -> None:
    """A request that had the only server and ends beside others that the balancer counts is not among those."""
    acquire, give_back = RELEASES[release]
    monkeypatch.setattr(LLMServerClient, "_acquire_server", acquire)
    monkeypatch.setattr(LLMServerClient, "_release_server", give_back)
    balancer = named("a")
    client = client_of(balancer)

    async def request(request_id: str, ends: asyncio.Event) -> None:
        server_id, _ = await client._acquire_server(request_id, prompt_ids=[1])
        await ends.wait()
        client._release_server(server_id, **({"request_id": request_id} if names_the_request else {}))

    async def main() -> None:
        ends = asyncio.Event()
        first = asyncio.create_task(request("held", ends))
        while not (client._not_balanced or first.done()):
            await asyncio.sleep(0)
        balancer.subject.add_servers({"b": "handle of b"})
        client.refresh_servers()
        others = [asyncio.create_task(request(str(number), ends)) for number in range(4)]
        while balancer.subject.get_total_inflight() < 4 and not any(other.done() for other in others):
            await asyncio.sleep(0)
        ends.set()
        await asyncio.gather(first, *others)

    asyncio.run(main())
    assert balancer.calls["release_server"] == 1 + 4  # the first was for finding out that there is one server
    assert balancer.subject.get_total_inflight() == 0
    assert not client._not_balanced
