"""One server is not asked for; of several, verl's balancer chooses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from goldilocks.verl.v1.client import StreamingClient


class Actor:
    """verl's load balancer in this process, called as an actor is; counts how often it is asked for a server."""

    def __init__(self, *servers: str) -> None:
        self.balancer = GlobalRequestLoadBalancer({name: f"handle of {name}" for name in servers})
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


def client_of(actor: Actor) -> StreamingClient:
    return StreamingClient(LLMServerClient(config=None, load_balancer_handle=actor))


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
