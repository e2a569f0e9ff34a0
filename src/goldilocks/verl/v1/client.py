"""verl's client of the rollout servers, as our workers use it.

It knows the sessions of its worker and which request each has at which server, so that they can be aborted there and
waited for. And it asks verl's load balancer for a server only where there are several to choose from: verl's client
sends it two messages a rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY

from goldilocks.verl.aborts import Aborts
from goldilocks.verl.patches.vllm import TOP

Server = tuple[str, Any]  # its name and its handle


@dataclass(eq=False)
class Session:
    """One rollout in the making: what it has cost so far, and where it is."""

    uid: str
    index: int
    tokens: int = 0  # of the answers that servers have returned
    server: Any = None  # that works on it now
    request_id: str = ""  # by which that server knows it
    aborted: bool = False  # whether that server was asked to end it


current_session: contextvars.ContextVar[Session | None] = contextvars.ContextVar("session", default=None)


class Cancelled(Exception):
    """The group of this session is no longer needed."""


class StreamingClient(LLMServerClient):
    """Takes over the state of ``client``, verl's own.

    Invariant: a session of a cancelled group makes no further request, and what it has at a server is aborted.
    """

    def __init__(self, client: LLMServerClient) -> None:
        vars(self).update(vars(client))
        self._cancelled: set[str] = set()
        self._sessions: dict[str, set[Session]] = {}
        self._at_servers: set[Session] = set()
        self._none_at_servers = asyncio.Event()
        self._none_at_servers.set()
        self._only: asyncio.Task[Server | None] | None = None
        self._held: set[str] = set()  # the requests that the balancer does not know of
        self._places: dict[str, asyncio.Semaphore] = {}  # of each server
        self.aborts = Aborts(self.config.actor_rollout_ref.rollout.name)
        gates = OmegaConf.select(self.config, "batch_filter.enable_two_gate_filter")
        on_vllm = self.config.actor_rollout_ref.rollout.name == "vllm"
        self._extra = {"extra_args": {TOP: True}} if gates and on_vllm else {}  # our own server always has them

    # -- sessions ------------------------------------------------------------------------------------------------------

    def begin(self, uid: str, index: int) -> Session:
        """A rollout of the group is about to be made."""
        session = Session(uid, index)
        self._sessions.setdefault(uid, set()).add(session)
        return session

    def end(self, session: Session) -> None:
        """The rollout is made, or given up."""
        self._sessions[session.uid].discard(session)
        if not self._sessions[session.uid]:
            del self._sessions[session.uid]
            self._cancelled.discard(session.uid)

    def cancel(self, uid: str) -> None:
        """Abort what the group has at servers; one that cannot abort lets it run to its end."""
        sessions = self._sessions.get(uid)
        if not sessions:
            return
        self._cancelled.add(uid)
        for session in sessions & self._at_servers:
            if session.request_id and not session.aborted:
                session.aborted = self.aborts.ask(session.server, session.request_id)

    def is_cancelled(self, session: Session) -> bool:
        """Whether nobody needs it any more."""
        return session.uid in self._cancelled

    async def drained(self, within: float) -> int:
        """Wait until no session is at a server, at most so many seconds; return how many still are."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._none_at_servers.wait(), within)
        return len(self._at_servers)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, *args: Any, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """As verl's; a session is at a server from here to the answer. Requests of validation have none."""
        session = current_session.get()
        if session is None:
            return await super().generate(*args, sampling_params=sampling_params, **kwargs)
        if self.is_cancelled(session):
            raise Cancelled(session.uid)
        self._at_servers.add(session)
        self._none_at_servers.clear()
        try:
            output = await super().generate(*args, sampling_params={**sampling_params, **self._extra}, **kwargs)
            session.tokens += len(output.token_ids)
            if session.aborted:
                self.aborts.answered(output.stop_reason)
            return output
        finally:
            session.server, session.request_id, session.aborted = None, "", False
            self._at_servers.discard(session)
            if not self._at_servers:
                self._none_at_servers.set()

    def _vllm_request_id(self, request_id: str) -> str:
        """verl's name of a request; this is the last moment before it is sent."""
        name: str = super()._vllm_request_id(request_id)
        if session := current_session.get():
            if self.is_cancelled(session):
                raise Cancelled(session.uid)
            session.request_id = name
        return name

    # -- servers -------------------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """A new wave of prompts: servers may have come or gone."""
        self._only = None

    async def _acquire_server(self, request_id: str, **extra: Any) -> Server:
        name, server = await self._choose_server(request_id, **extra)
        await self._place_at(name).acquire()
        if session := current_session.get():
            session.server = server
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

    def _place_at(self, server: str) -> asyncio.Semaphore:
        """Requests beyond what the server's actor takes at once wait here: an abort must not queue behind them."""
        if server not in self._places:
            rollout = self.config.actor_rollout_ref.rollout
            at_once = max(1000 - CONTROL_METHOD_CONCURRENCY, rollout.max_num_seqs)
            self._places[server] = asyncio.Semaphore(max(1, at_once // rollout.agent.num_workers))
        return self._places[server]

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """As verl's; nothing is told of a request that nothing was asked for."""
        self._place_at(server_id).release()
        if request_id in self._held:
            self._held.discard(request_id)
        else:
            super()._release_server(server_id, request_id=request_id)
