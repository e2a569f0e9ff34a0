"""verl's load balancer is asked for a server where there are several to choose from.

verl's client asks an actor for a server before each request and tells it after: two messages a rollout, for nothing
where there is one server. Which servers there are is looked up once for every wave of prompts.
"""

from __future__ import annotations

import asyncio
from typing import Any

Server = tuple[str, Any]


class Balancer:
    """Takes the place of the two methods by which ``client``, verl's ``LLMServerClient``, talks to the balancer."""

    def __init__(self, client: Any) -> None:
        self._actor = client._load_balancer
        self._acquire, self._release = client._acquire_server, client._release_server
        self._only: asyncio.Task[Server | None] | None = None
        self._held: set[str] = set()  # the requests that the balancer does not know of
        client._acquire_server, client._release_server = self.acquire, self.release

    def look_again(self) -> None:
        """A new wave: servers may have come or gone."""
        self._only = None

    async def acquire(self, request_id: str, **extra: Any) -> Server:
        """As the client's: the server's name and its handle."""
        if self._only is None:
            self._only = asyncio.create_task(self._only_server(request_id, extra))
        server = await self._only
        if server is None:
            return await self._acquire(request_id, **extra)
        self._held.add(request_id)
        return server

    def release(self, server_id: str, request_id: str | None = None) -> None:
        """As the client's; nothing is told of a request that nothing was asked for."""
        if request_id in self._held:
            self._held.discard(request_id)
        else:
            self._release(server_id, request_id=request_id)

    async def _only_server(self, request_id: str, extra: dict[str, Any]) -> Server | None:
        if len(await self._actor.get_all_servers.remote()) != 1:
            return None
        server: Server = await self._acquire(request_id, **extra)
        self._release(server[0], request_id=request_id)
        return server
