"""One server is not asked for; of several, verl's balancer chooses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from goldilocks.verl.patches.balancer import Balancer


class Client:
    """The part of verl's client that talks to the balancer, with verl's balancer in the same process."""

    def __init__(self, *servers: str) -> None:
        self.balancer = GlobalRequestLoadBalancer({name: f"handle of {name}" for name in servers})
        self.asked = 0
        self._load_balancer = SimpleNamespace(get_all_servers=SimpleNamespace(remote=self._servers))

    async def _servers(self) -> list[str]:
        return self.balancer.get_all_servers()

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        self.asked += 1
        return self.balancer.acquire_server(request_id)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        self.balancer.release_server(server_id, request_id)


async def request(client: Client, request_id: str) -> str:
    server_id, handle = await client._acquire_server(request_id)
    assert handle == f"handle of {server_id}"
    await asyncio.sleep(0)
    client._release_server(server_id, request_id=request_id)
    return server_id


def test_the_only_server_is_asked_for_once_a_wave() -> None:
    client = Client("a")
    balancer = Balancer(client)

    async def wave() -> list[str]:
        return await asyncio.gather(*(request(client, str(i)) for i in range(20)))

    async def main() -> None:
        assert await wave() == ["a"] * 20
        assert client.asked == 1
        balancer.look_again()
        await wave()

    asyncio.run(main())
    assert client.asked == 2
    assert client.balancer.get_inflight_count("a") == 0


def test_of_two_servers_the_balancer_chooses_for_every_request() -> None:
    client = Client("a", "b")
    Balancer(client)

    async def main() -> list[str]:
        return await asyncio.gather(*(request(client, str(i)) for i in range(20)))

    served = asyncio.run(main())
    assert client.asked == 20
    assert served.count("a") == served.count("b") == 10
    assert client.balancer.get_inflight_count("a") == client.balancer.get_inflight_count("b") == 0


def test_a_server_that_comes_is_used_from_the_next_wave() -> None:
    client = Client("a")
    balancer = Balancer(client)

    async def main() -> set[str]:
        await request(client, "0")
        client.balancer.add_servers({"b": "handle of b"})
        balancer.look_again()
        return set(await asyncio.gather(*(request(client, str(i)) for i in range(1, 21))))

    assert asyncio.run(main()) == {"a", "b"}


def test_no_server_is_what_verl_says_it_is() -> None:
    client = Client()
    Balancer(client)
    with pytest.raises(RuntimeError, match="No available servers"):
        asyncio.run(request(client, "0"))
