"""One server is not asked for, of several verl's balancer chooses; what is cancelled is aborted and counted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from goldilocks.verl.patches.vllm import TOP
from goldilocks.verl.v1.client import Cancelled, StreamingClient, current_session


class Actor:
    """verl's load balancer in this process, called as an actor is; counts how often it is asked for a server."""

    def __init__(self, *servers: str, **handles: Any) -> None:
        self.balancer = GlobalRequestLoadBalancer({name: f"handle of {name}" for name in servers} | handles)
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.balancer, name)

        def remote(*args: Any, **kwargs: Any) -> asyncio.Future[Any]:
            self.asked += name == "acquire_server"
            answer = asyncio.get_running_loop().create_future()
            try:
                answer.set_result(method(*args, **kwargs))
            except RuntimeError as error:
                answer.set_exception(error)
            return answer

        return SimpleNamespace(remote=remote)


def client_of(actor: Actor, name: str = "transformers", max_num_seqs: int = 1024, workers: int = 1) -> StreamingClient:
    rollout = {"name": name, "max_num_seqs": max_num_seqs, "agent": {"num_workers": workers}}
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": rollout}, "batch_filter": {"enable_two_gate_filter": 1}}
    )
    return StreamingClient(LLMServerClient(config=config, load_balancer_handle=actor))


async def request(client: StreamingClient, request_id: str) -> str:
    server_id, handle = await client._acquire_server(request_id)
    assert handle == f"handle of {server_id}"
    await asyncio.sleep(0)
    client._release_server(server_id, request_id=request_id)
    return server_id


def test_the_only_server_is_asked_for_once_a_wave() -> None:
    actor = Actor("a")
    client = client_of(actor)

    async def wave() -> list[str]:
        return await asyncio.gather(*(request(client, str(i)) for i in range(20)))

    async def main() -> None:
        assert await wave() == ["a"] * 20
        assert actor.asked == 1
        client.look_again()
        await wave()

    asyncio.run(main())
    assert actor.asked == 2
    assert actor.balancer.get_inflight_count("a") == 0


def test_of_two_servers_the_balancer_chooses_for_every_request() -> None:
    actor = Actor("a", "b")
    client = client_of(actor)

    async def main() -> list[str]:
        return await asyncio.gather(*(request(client, str(i)) for i in range(20)))

    served = asyncio.run(main())
    assert actor.asked == 20
    assert served.count("a") == served.count("b") == 10
    assert actor.balancer.get_inflight_count("a") == actor.balancer.get_inflight_count("b") == 0


def test_a_server_that_comes_is_used_from_the_next_wave() -> None:
    actor = Actor("a")
    client = client_of(actor)

    async def main() -> set[str]:
        await request(client, "0")
        actor.balancer.add_servers({"b": "handle of b"})
        client.look_again()
        return set(await asyncio.gather(*(request(client, str(i)) for i in range(1, 21))))

    assert asyncio.run(main()) == {"a", "b"}


def test_no_server_is_what_verl_says_it_is() -> None:
    with pytest.raises(RuntimeError, match="No available servers"):
        asyncio.run(request(client_of(Actor()), "0"))


class SlowServer:
    """A rollout server that answers when it is told to, or asked to abort; counts how many it has at once."""

    def __init__(self, aborts: bool = True) -> None:
        self.requests: dict[str, asyncio.Future[TokenOutput]] = {}
        self.params: list[dict[str, Any]] = []
        self.prompts: list[list[int]] = []
        self.most = 0
        self.generate = SimpleNamespace(remote=self._generate)
        self.abort_request = SimpleNamespace(remote=self._abort if aborts else lambda request_id: None)

    def _generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_rest: Any
    ) -> asyncio.Future[TokenOutput]:
        self.params.append(sampling_params)
        self.prompts.append(prompt_ids)
        self.requests[request_id] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.requests))
        return self.requests[request_id]

    def _abort(self, request_id: str) -> None:
        self.answer(request_id, [7], "aborted")

    def answer(self, request_id: str, tokens: list[int], stop_reason: str = "completed") -> None:
        self.requests.pop(request_id).set_result(TokenOutput(token_ids=tokens, stop_reason=stop_reason))

    def answer_all(self) -> None:
        for request_id in list(self.requests):
            self.answer(request_id, [1, 2, 3])


def one_server(server: SlowServer, **options: Any) -> StreamingClient:
    return client_of(Actor(a=server), **options)


def start(client: StreamingClient, uid: str, index: int) -> asyncio.Task[Any]:
    async def run() -> Any:
        session = client.begin(uid, index)
        current_session.set(session)
        try:
            return await client.generate(f"{uid}{index}", prompt_ids=[1], sampling_params={"logprobs": True})
        finally:
            client.end(session)

    return asyncio.create_task(run())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_cancelled_group_is_aborted_at_its_server_and_the_effect_is_counted() -> None:
    async def main() -> None:
        server = SlowServer()
        client = one_server(server)
        tasks = [start(client, "x", 0), start(client, "x", 1), start(client, "y", 0)]
        await settle()
        client.cancel("x")
        assert [len((await task).token_ids) for task in tasks[:2]] == [1, 1]
        assert (client.aborts.asked, client.aborts.ended, client.aborts.tokens) == (2, 2, 2)
        assert await client.drained(0.01) == 1
        server.answer_all()
        await tasks[2]
        assert await client.drained(0.01) == 0

    asyncio.run(main())


def test_a_server_whose_aborts_do_nothing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> StreamingClient:
        server = SlowServer(aborts=False)
        client = one_server(server)
        for wave in range(3):
            tasks = [start(client, f"x{wave}", index) for index in range(16)]
            await settle()
            client.cancel(f"x{wave}")
            server.answer_all()
            await asyncio.gather(*tasks)
        return client

    client = asyncio.run(main())
    assert (client.aborts.asked, client.aborts.ended) == (48, 0)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["none of 16 aborts ended an answer"]


def test_of_an_engine_that_is_not_known_nothing_is_aborted() -> None:
    async def main() -> None:
        server = SlowServer()
        client = one_server(server, name="trtllm")
        task = start(client, "x", 0)
        await settle()
        client.cancel("x")
        assert server.requests
        server.answer_all()
        assert len((await task).token_ids) == 3
        assert client.aborts.asked == 0

    asyncio.run(main())


def test_requests_beyond_what_a_server_takes_at_once_wait_and_may_be_cancelled_unsent() -> None:
    async def main() -> None:
        server = SlowServer()
        client = one_server(server, max_num_seqs=8, workers=164)  # 984 places over 164 workers
        tasks = [start(client, "x", index) for index in range(10)]
        await settle()
        assert len(server.requests) == 6
        client.cancel("x")
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert server.most == 6
        assert sum(isinstance(outcome, Cancelled) for outcome in outcomes) == 4

    asyncio.run(main())


@pytest.mark.parametrize(("name", "asked"), [("vllm", {TOP: True}), ("transformers", None)])
def test_gate_2_asks_vllm_for_the_largest_log_prob(name: str, asked: dict[str, bool] | None) -> None:
    async def main() -> list[dict[str, Any]]:
        server = SlowServer()
        client = one_server(server, name=name)
        task = start(client, "x", 0)
        await settle()
        server.answer_all()
        await task
        return server.params

    assert [params.get("extra_args") for params in asyncio.run(main())] == [asked]


def test_a_paused_session_goes_on_from_what_it_has_and_its_agent_loop_sees_one_answer() -> None:
    async def main() -> tuple[Any, SlowServer, StreamingClient]:
        server = SlowServer()
        client = one_server(server)
        client.config.actor_rollout_ref.rollout.response_length = 10
        task = start(client, "x", 0)
        await settle()
        assert await client.pause(within=10) == 0
        assert [(one.uid, one.index, one.tokens) for one in client.unfinished] == [("x", 0, 1)]
        await settle()
        assert not server.requests  # nothing is asked for before it goes on
        client.resume()
        await settle()
        server.answer_all()
        return await task, server, client

    output, server, client = asyncio.run(main())
    assert output.token_ids == [7, 1, 2, 3]
    assert output.stop_reason == "completed"
    assert [params.get("max_tokens") for params in server.params] == [None, 9]
    assert server.prompts == [[1], [1, 7]]
    assert (client.aborts.asked, client.aborts.ended) == (1, 1)


def test_requests_that_wait_for_a_place_when_generation_pauses_are_sent_when_it_goes_on() -> None:
    async def main() -> list[int]:
        server = SlowServer()
        client = one_server(server, max_num_seqs=8, workers=164)  # 984 places over 164 workers
        client.config.actor_rollout_ref.rollout.response_length = 10
        tasks = [start(client, "x", index) for index in range(10)]
        await settle()
        assert await client.pause(within=10) == 0
        assert sorted(one.tokens for one in client.unfinished) == [0] * 4 + [1] * 6
        client.resume()
        while not all(task.done() for task in tasks):
            server.answer_all()
            await settle()
        return sorted(len(task.result().token_ids) for task in tasks)

    assert asyncio.run(main()) == [3] * 4 + [4] * 6


def test_a_paused_session_whose_group_is_cancelled_makes_no_further_request() -> None:
    async def main() -> None:
        server = SlowServer()
        client = one_server(server)
        task = start(client, "x", 0)
        await settle()
        await client.pause(within=10)
        client.cancel("x")
        assert not list(client.unfinished)
        client.resume()
        with pytest.raises(Cancelled):
            await task
        assert not server.requests

    asyncio.run(main())


def test_a_server_that_does_not_abort_is_asked_again_and_said_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goldilocks.verl.v1.client.ASK_AGAIN_S", 0.01)

    async def main() -> None:
        server = SlowServer(aborts=False)
        asked: list[str] = []
        server.abort_request = SimpleNamespace(remote=asked.append)
        client = one_server(server)
        task = start(client, "x", 0)
        await settle()
        assert await client.pause(within=0.1) == 1
        assert len(asked) > 1
        client.resume()
        server.answer_all()
        assert len((await task).token_ids) == 3

    asyncio.run(main())
