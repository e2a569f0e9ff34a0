"""verl's client of the rollout servers, for our workers.

It maps each session of its worker to its server and request, so that requests can be aborted and waited for.
A paused session waits here with what it has written and asks for the rest when it continues: its agent loop sees one
answer. The requests of single-turn rollouts go to a server in one message (``messages.exchanged``).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY, TokenOutput

from goldilocks.engine.verl_server.messages import ENDED, TOP, Aborts, Requests, exchanged
from goldilocks.verl.dispatch.answers import TOP_LOG_PROBS, ResumableAnswer, continued, name_of, of_turn
from goldilocks.verl.store import Versions

ASK_AGAIN_S = 1.0  # an abort may overtake its request: it is repeated
LET_GO_S = 1.0  # for a cancelled agent loop to end its calls of tools
WITHOUT_TEXT = {"detokenize": False, "flat_logprobs": True}  # vLLM returns log-probs as numbers, not as objects
Server = tuple[str, Any]  # its name and its handle


def accepted_keywords(function: Callable[..., Any], **keywords: Any) -> dict[str, Any]:
    """Return those keywords that this verl's function has a parameter for; all of them if it ends in ``**``."""
    known = inspect.signature(function).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    return {name: value for name, value in keywords.items() if takes_any or name in known}


# -- sessions ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Session:
    """One rollout on a worker: what it has cost and been answered so far, and at which server it is."""

    uid: str
    index: int
    tokens: int = 0  # that servers have returned
    server: Any = None  # that works on it now
    request_id: str = ""  # by which that server knows it
    aborted: bool = False  # whether that server was asked to end it
    answers: list[ResumableAnswer] = field(default_factory=list)  # to its requests, in order
    asked: int = 0  # requests that its agent loop has made
    task: asyncio.Task[Any] | None = None  # while its agent loop runs

    @property
    def versions(self) -> Versions:
        """Which policy wrote how many of its tokens, in order."""
        return [span for answer in self.answers for span in answer.versions]

    def next_answer(self, prompt_ids: Sequence[int]) -> ResumableAnswer:
        """The answer to the agent loop's next request: the saved one if the request is the same, or a new one."""
        name, place = name_of(prompt_ids), self.asked
        self.asked += 1
        if place < len(self.answers) and self.answers[place].prompt == name:
            return self.answers[place]
        self.answers[place:] = [ResumableAnswer(name)]  # a saved answer to another request is dropped
        return self.answers[place]

    def divide_top_log_probs(self, outputs: Sequence[Any]) -> None:
        """Give each output the largest log-probs of its own tokens: verl's loops keep those of the first turn alone."""
        if len(self.answers) == len(outputs) == 1:
            return
        found = [answer.output().extra_fields.get(TOP_LOG_PROBS) for answer in self.answers]
        values = [value for column in found if column is not None for value in column]
        rows = None if None in found else _by_token(values, [one.response_mask for one in outputs])
        for place, one in enumerate(outputs):
            one.extra_fields.pop(TOP_LOG_PROBS, None)
            if rows is not None:
                one.extra_fields[TOP_LOG_PROBS] = rows[place]

    def stop(self) -> None:
        """Cancel the agent loop where it waits, once: verl's loop then releases its tool, which may take a while."""
        task, self.task = self.task, None
        if task is not None:
            task.cancel()


def _by_token(values: Sequence[float], masks: Sequence[Sequence[int]]) -> list[list[float]] | None:
    """Spread the values of generated tokens over rows, with 0 for other tokens; None where their numbers differ."""
    written = sum(map(sum, masks))
    if written > len(values) or (len(masks) > 1 and written < len(values)):
        return None
    left = iter(values)
    return [[next(left) if generated else 0.0 for generated in mask] for mask in masks]


current_session: contextvars.ContextVar[Session | None] = contextvars.ContextVar("session", default=None)


class Cancelled(Exception):
    """The group of this session is no longer needed."""


class NotNow(Exception):
    """Generation is paused: the request was not sent."""


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """The request of a single-turn session."""

    session: Session
    prompt_ids: list[int]
    params: dict[str, Any]
    name: str = field(default_factory=lambda: uuid4().hex)  # of the request


@dataclass(frozen=True)
class Reply:
    """The outcome of a turn: the server's answer, or the error that prevented it."""

    turn: TurnRequest
    outcome: TokenOutput | BaseException


Deliver = Callable[[list[Reply]], None]


# -- the client --------------------------------------------------------------------------------------------------------


@dataclass
class ServerLease:
    """The server that the load balancer chose for turns of a group; it is released with the last reply."""

    uid: str
    server_id: str
    unanswered: int


class StreamingClient(LLMServerClient):
    """verl's client with sessions, made from one of verl's, whose attributes it shares.

    Invariant: a session of a cancelled group makes no further request, and what it has at a server is aborted.
    """

    def __init__(self, client: LLMServerClient) -> None:
        vars(self).update(vars(client))
        self._cancelled: set[str] = set()
        self._sessions: dict[str, set[Session]] = {}
        self._at_servers: set[Session] = set()
        self._none_at_servers = asyncio.Event()
        self._none_at_servers.set()
        self._going = asyncio.Event()  # cleared while generation is paused
        self._going.set()
        self._leases: dict[str, ServerLease] = {}  # by the name of each turn that has no reply yet
        self._places: dict[str, asyncio.Semaphore] = {}  # free places for messages, of each server
        engine: str = self.config.actor_rollout_ref.rollout.name
        self.aborts, self._on_vllm = Aborts(engine), engine == "vllm"
        gates = OmegaConf.select(self.config, "batch_filter.enable_two_gate_filter")
        # Our own engine returns them unasked.
        self._ask_top_log_probs = {"extra_args": {TOP: True}} if gates and self._on_vllm else {}

    # -- sessions ------------------------------------------------------------------------------------------------------

    def begin(self, uid: str, index: int, saved: Mapping[str, Any] | None = None) -> Session:
        """Open a session; ``saved`` is the answer that its rollout goes on from."""
        session = Session(uid, index, answers=[ResumableAnswer.from_state_dict(saved)] if saved else [])
        session.tokens = sum(count for _, count in session.versions)
        self._sessions.setdefault(uid, set()).add(session)
        return session

    def end(self, session: Session) -> None:
        self._sessions[session.uid].discard(session)
        if not self._sessions[session.uid]:
            del self._sessions[session.uid]
            self._cancelled.discard(session.uid)

    def cancel(self, *uids: str) -> None:
        """Abort what the groups have at servers, and end agent loops that wait for a tool.

        A server that cannot abort lets a request run to its end.
        """
        self._cancelled.update(uid for uid in uids if uid in self._sessions)
        sessions = {session for uid in uids for session in self._sessions.get(uid, ())}
        self._abort(session for session in sessions & self._at_servers if not session.aborted)
        for session in sessions - self._at_servers:
            session.stop()

    def is_cancelled(self, session: Session) -> bool:
        """Whether the session's group is cancelled."""
        return session.uid in self._cancelled

    async def pause(self, within: float) -> int:
        """Stop every session with what it has written; return how many are at a server after ``within`` seconds."""
        self._going.clear()
        deadline = time.monotonic() + within
        while self._at_servers and (left := deadline - time.monotonic()) > 0:
            self._abort(self._at_servers)
            await self._left_after(min(left, ASK_AGAIN_S))
        return len(self._at_servers)

    def resume(self) -> None:
        self._going.set()

    @property
    def unfinished(self) -> Iterator[Session]:
        """The sessions that have not ended, but for those of cancelled groups."""
        return (one for uid, group in self._sessions.items() if uid not in self._cancelled for one in group)

    def _abort(self, sessions: Iterable[Session]) -> None:
        at_server: dict[Any, list[Session]] = {}
        for session in sessions:
            if session.request_id:
                at_server.setdefault(session.server, []).append(session)
        for server, those in at_server.items():
            asked = self.aborts.ask(server, [one.request_id for one in those])
            for one in those:
                one.aborted = asked

    async def drained(self, within: float) -> int:
        """Wait until no session is at a server, at most ``within`` seconds; return how many still are.

        Aborts of cancelled groups are asked for again. Their sessions are given a moment to end, so that their step is
        charged with them; a tool that does not let go holds nobody up.
        """
        deadline = time.monotonic() + within
        while (left := deadline - time.monotonic()) > 0 and await self._left_after(min(left, ASK_AGAIN_S)):
            self._abort(session for session in self._at_servers if self.is_cancelled(session))
        deadline = time.monotonic() + min(within, LET_GO_S)
        while self._cancelled and not self._at_servers and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
        return len(self._at_servers)

    async def _left_after(self, within: float) -> int:
        """Wait until no session is at a server, at most ``within`` seconds; return how many are. Send no aborts."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._none_at_servers.wait(), within)
        return len(self._at_servers)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any:
        """As verl's; returns when the answer is complete, however often it pauses. Validations have no session."""
        sampling_params = self._without_text(sampling_params)
        session = current_session.get()
        if session is None:
            return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)
        config = self.config.actor_rollout_ref.rollout
        turn = of_turn(sampling_params, config, session.asked)
        answer = session.next_answer(prompt_ids)
        while not answer.done:
            await self._going.wait()
            if self.is_cancelled(session):
                raise Cancelled(session.uid)
            params = continued(turn, config, prompt=len(prompt_ids), written=len(answer.token_ids))
            if params.get("max_tokens", 1) < 1:
                break  # paused at its last token
            with contextlib.suppress(NotNow):
                ids = [*prompt_ids, *answer.token_ids]
                await self._add_to(answer, session, request_id, prompt_ids=ids, sampling_params=params, **kwargs)
        if self.is_cancelled(session):  # its agent loop must not call a tool
            raise Cancelled(session.uid)
        return answer.output()

    async def _add_to(self, answer: ResumableAnswer, session: Session, request_id: str, **request: Any) -> None:
        """Ask for an answer, or for the rest of it. The session is at a server until the reply."""
        request["sampling_params"] |= self._ask_top_log_probs
        self._enter(session)
        try:
            output = await super().generate(request_id, **request)
            answer.parts.append(output)
            self._charge(session, output.token_ids, output.stop_reason)
            answer.done = output.stop_reason not in ENDED or self.is_cancelled(session)
        finally:
            self._leave(session)

    def _without_text(self, sampling_params: dict[str, Any]) -> dict[str, Any]:
        """Add what spares vLLM the text, which nobody reads unless there are stop strings to find in it."""
        if not self._on_vllm or sampling_params.get("stop"):
            return sampling_params
        quick = dict(WITHOUT_TEXT)
        if sampling_params.get("prompt_logprobs") is not None:
            quick.pop("flat_logprobs", None)  # verl cuts those of a prompt, and flat ones cannot be cut to nothing
        return {**quick, **sampling_params}

    def _enter(self, session: Session) -> None:
        """Count the session as at a server, also before one is chosen."""
        self._at_servers.add(session)
        self._none_at_servers.clear()

    def _charge(self, session: Session, token_ids: list[int], stop_reason: str | None) -> None:
        session.tokens += len(token_ids)
        if session.aborted:
            self.aborts.answered(stop_reason, len(token_ids))

    def _leave(self, session: Session) -> None:
        session.server, session.request_id, session.aborted = None, "", False
        self._at_servers.discard(session)
        if not self._at_servers:
            self._none_at_servers.set()

    def _vllm_request_id(self, request_id: str) -> str:
        """verl's name of a request. verl asks for it right before it sends the request, so this can still stop it."""
        name: str = super()._vllm_request_id(request_id)
        if session := current_session.get():
            if self.is_cancelled(session):
                raise Cancelled(session.uid)
            if not self._going.is_set():
                raise NotNow
            session.request_id = name
        return name

    async def ask(self, turns: list[TurnRequest], deliver: Deliver) -> None:
        """Send each server its turns in one message, and call ``deliver`` with the replies as they come.

        The load balancer chooses one server for the turns of a group. Returns when every turn has a reply. These
        sessions do not pause.
        """
        groups: dict[str, list[TurnRequest]] = {}
        for turn in turns:
            self._enter(turn.session)
            groups.setdefault(turn.session.uid, []).append(turn)
        choose = LLMServerClient._acquire_server  # verl's own, which waits for no place
        about = {uid: accepted_keywords(choose, prompt_ids=group[0].prompt_ids) for uid, group in groups.items()}
        chosen = (choose(self, uid, **known) for uid, known in about.items())
        servers = await asyncio.gather(*chosen, return_exceptions=True)
        parts: dict[str, tuple[Any, list[TurnRequest]]] = {}
        for (uid, group), server in zip(groups.items(), servers, strict=True):
            if isinstance(server, BaseException):
                self._reply([Reply(turn, server) for turn in group], deliver)
                continue
            self._leases |= dict.fromkeys((turn.name for turn in group), ServerLease(uid, server[0], len(group)))
            parts.setdefault(server[0], (server[1], []))[1].extend(group)
        await asyncio.gather(*(self._ask_server(name, *part, deliver) for name, part in parts.items()))

    async def _ask_server(self, name: str, server: Any, turns: list[TurnRequest], deliver: Deliver) -> None:
        """Ask by one message, when the server has a place for it."""
        async with self._place_at(name):
            unneeded = [turn for turn in turns if self.is_cancelled(turn.session)]
            self._reply([Reply(turn, Cancelled(turn.session.uid)) for turn in unneeded], deliver)
            waiting = {turn.name: turn for turn in turns if not self.is_cancelled(turn.session)}
            if not waiting:
                return
            requests: Requests = []
            for turn in waiting.values():
                turn.session.server, turn.session.request_id = server, turn.name
                requests.append((turn.name, turn.prompt_ids, self._without_text(turn.params) | self._ask_top_log_probs))
            try:
                async for outcomes in exchanged(server, requests):
                    self._reply([Reply(waiting.pop(one), made) for one, made in outcomes], deliver)
            except Exception as error:  # the server is gone
                self._reply([Reply(turn, error) for turn in waiting.values()], deliver)

    def _reply(self, replies: list[Reply], deliver: Deliver) -> None:
        """Charge what was generated, release the servers, and deliver."""
        for reply in replies:
            if not isinstance(reply.outcome, BaseException):
                self._charge(reply.turn.session, reply.outcome.token_ids, reply.outcome.stop_reason)
            self._leave(reply.turn.session)
            if lease := self._leases.pop(reply.turn.name, None):
                lease.unanswered -= 1
                if not lease.unanswered:
                    about = accepted_keywords(LLMServerClient._release_server, request_id=lease.uid)
                    super()._release_server(lease.server_id, **about)
        if replies:
            deliver(replies)

    # -- servers -------------------------------------------------------------------------------------------------------

    async def _acquire_server(self, request_id: str, **about: Any) -> Server:
        name, server = await super()._acquire_server(request_id, **about)
        await self._place_at(name).acquire()
        if session := current_session.get():
            session.server = server
        return name, server

    def _release_server(self, server_id: str, *about: Any, **named: Any) -> None:
        self._place_at(server_id).release()
        super()._release_server(server_id, *about, **named)

    def _place_at(self, server: str) -> asyncio.Semaphore:
        """Return the places for messages at a server. Further ones wait here: aborts must not queue behind them."""
        if server not in self._places:
            rollout = self.config.actor_rollout_ref.rollout
            at_once = max(1000 - CONTROL_METHOD_CONCURRENCY, rollout.max_num_seqs)
            self._places[server] = asyncio.Semaphore(max(1, at_once // rollout.agent.num_workers))
        return self._places[server]
