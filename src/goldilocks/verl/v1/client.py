"""verl's client of the rollout servers, as our workers use it.

It notes which requests each group has at which server, so that they can be aborted there. And it asks verl's load
balancer for a server only where there are several to choose from: verl's client sends it two messages a rollout.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import defaultdict
from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient

Server = tuple[str, Any]  # its name and its handle

# The group and the index of the rollout that the current task works on.
session: contextvars.ContextVar[tuple[str, int] | None] = contextvars.ContextVar("session", default=None)


class Cancelled(Exception):
    """The group of this session is no longer needed."""


class StreamingClient(LLMServerClient):
    """Takes over the state of ``client``, verl's own."""

    def __init__(self, client: LLMServerClient) -> None:
        vars(self).update(vars(client))
        self.cancelled: set[str] = set()
        self._requests: dict[str, dict[int, tuple[Any, str]]] = defaultdict(dict)
        self._only: asyncio.Task[Server | None] | None = None
        self._held: set[str] = set()  # the requests that the balancer does not know of

    # -- which server --------------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """A new wave of prompts: servers may have come or gone."""
        self._only = None

    async def _acquire_server(self, request_id: str, **extra: Any) -> Server:
        name, server = await self._choose_server(request_id, **extra)
        if (current := session.get()) is not None:
            uid, index = current
            self._requests[uid][index] = (server, "")
        return name, server

    async def _choose_server(self, request_id: str, **extra: Any) -> Server:
        if self._only is None:
            self._only = asyncio.create_task(self._only_server(request_id, extra))
        server = await self._only
        if server is None:
            return await super()._acquire_server(request_id, **extra)
        self._held.add(request_id)
        return server

    async def _only_server(self, request_id: str, extra: dict[str, Any]) -> Server | None:
        if len(await self._load_balancer.get_all_servers.remote()) != 1:
            return None
        server: Server = await super()._acquire_server(request_id, **extra)
        super()._release_server(server[0], request_id=request_id)
        return server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """As verl's; nothing is told of a request that nothing was asked for."""
        if request_id in self._held:
            self._held.discard(request_id)
        else:
            super()._release_server(server_id, request_id=request_id)

    # -- which requests ------------------------------------------------------------------------------------------------

    def _vllm_request_id(self, request_id: str) -> str:
        """verl's name of a request, noted on its way to the server."""
        name: str = super()._vllm_request_id(request_id)
        if (current := session.get()) is not None:
            uid, index = current
            if uid in self.cancelled:
                raise Cancelled(uid)
            server, _ = self._requests[uid][index]
            self._requests[uid][index] = (server, name)
        return name

    def forget(self, uid: str, index: int) -> None:
        """The session is over."""
        self._requests.get(uid, {}).pop(index, None)
        if not self._requests.get(uid):
            self._requests.pop(uid, None)

    def abort(self, uid: str) -> None:
        """Abort what the group has in flight; a server that cannot lets it run to its end."""
        self.cancelled.add(uid)
        for server, request_id in self._requests.get(uid, {}).values():
            if request_id and hasattr(server, "abort_request"):
                server.abort_request.remote(request_id)
