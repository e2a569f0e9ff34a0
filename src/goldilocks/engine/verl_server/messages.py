"""What a rollout server is asked beside verl's ``generate``: many requests in one message, and to end a request early.

Both ends of the messages are here. Servers import this module, so it imports nothing of verl or torch.

The ``abort_request`` of verl 0.9.1 and of its main does nothing on vLLM 0.12 and later: it looks a request up by verl's
id, and vLLM keeps requests by an id of its own. verl's SGLang server has no such method. So the engine inside the
server actor is asked; its prefix cache stays.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Coroutine, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

logger = logging.getLogger(__name__)

Requests = list[tuple[str, list[int], dict[str, Any]]]  # names, prompts, sampling parameters
Answer = tuple[str, Any, "ServerTraceback | None"]  # of a request: its name, and its answer, or an exception and where

TOP = "goldilocks_top_log_probs"  # in a request's extra_args: the largest log-prob at each position is wanted
HOLDS = "goldilocks_holds_outputs"  # marks the loop of a vLLM engine that keeps outputs back (``held-outputs``)
TRIES, PAUSE_S = 20, 0.05  # an abort may reach the engine before its request does
SURE_AFTER = 16  # aborts without effect after which a warning says so
ENDED = ("aborted", "abort")  # the stop reasons of a request that was ended early
IDLE_TO_SLEEP = ("sglang",)  # engines that assert that they have no request when their memory is released


# -- many requests in one message --------------------------------------------------------------------------------------


async def exchanged(server: Any, requests: Requests) -> AsyncIterator[list[tuple[str, Any]]]:
    """Send the requests in one message; yield answers, or the exceptions in their place, by request as they come."""
    batch, left = uuid4().hex, len(requests)
    reply = server.generate_all.remote(batch, requests)
    while left:
        answers: list[Answer] = await reply
        for _, outcome, raised in answers:
            if raised is not None:
                outcome.__cause__ = raised
        left -= len(answers)
        yield [(name, outcome) for name, outcome, _ in answers]
        if left:
            reply = server.more_answers.remote(batch)


class ManyAnswers:
    """Gives a server that has verl's ``generate`` the two methods that ``exchanged`` calls.

    Generation waits for the Python of the server's process, and a Ray call for each answer is a large part of it.
    """

    if TYPE_CHECKING:
        generate: Callable[..., Coroutine[Any, Any, Any]]

    async def generate_all(self, batch: str, requests: Requests) -> list[Answer]:
        """Generate many answers for one message. Returns the first; ``more_answers`` of the same batch has the others.

        ``generate`` changes the parameters that it is given, and requests of one message may share them.
        """
        asked = {
            name: self.generate(prompt_ids=list(prompt), sampling_params=dict(params), request_id=name)
            for name, prompt, params in requests
        }
        _batches(self)[batch] = _Unanswered(asked)
        return await self.more_answers(batch)

    async def more_answers(self, batch: str) -> list[Answer]:
        """Wait for answers of a batch that has some left, and return all that have come."""
        unanswered = _batches(self)[batch]
        answers = await unanswered.more()
        if not unanswered.left:
            del _batches(self)[batch]
        return answers


def add_to_vllm() -> None:
    """Add the methods to verl's vLLM server. A request is made by the server's own ``generate``, on its event loop."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    for name in ("generate_all", "more_answers"):
        setattr(vLLMHttpServer, name, getattr(ManyAnswers, name))


def _batches(server: Any) -> dict[str, _Unanswered]:
    batches: dict[str, _Unanswered] = vars(server).setdefault("goldilocks_batches", {})
    return batches


class _Unanswered:
    """Answers that are being made, as tasks of the running event loop. One that fails, fails alone."""

    def __init__(self, asked: dict[str, Coroutine[Any, Any, Any]]) -> None:
        self.left = len(asked)  # answers that ``more`` has not returned
        self._answers: list[Answer] = []
        self._came = asyncio.Event()
        self._tasks = {asyncio.create_task(self._note(name, answer)) for name, answer in asked.items()}

    async def more(self) -> list[Answer]:
        """Wait for an answer; return all that have come since the last call."""
        await self._came.wait()
        self._came.clear()
        answers, self._answers = self._answers, []
        self.left -= len(answers)
        return answers

    async def _note(self, name: str, answer: Coroutine[Any, Any, Any]) -> None:
        raised = None
        try:
            outcome = await answer
        except Exception as error:
            outcome, raised = _sendable(error)
        except asyncio.CancelledError as error:  # as itself it would look like the client's own cancellation
            said = RuntimeError(f"the server cancelled the request: {error!r}").with_traceback(error.__traceback__)
            outcome, raised = _sendable(said)
        self._answers.append((name, outcome, raised))
        self._came.set()


class ServerTraceback(Exception):
    """Where an exception was raised in a server: the cause of the exception that the client gets.

    Pickle drops tracebacks; a cause is printed by every Python, notes are printed since 3.11.
    """

    def __init__(self, text: str, place: str) -> None:
        super().__init__(text, place)
        self.text, self.place = text, place

    def __str__(self) -> str:
        return f"\n{self.text}"


def _sendable(error: Exception) -> tuple[Exception, ServerTraceback]:
    """The exception, or where it would not survive pickling one that names it, and where it was raised."""
    from ray import cloudpickle

    raised = ServerTraceback("".join(traceback.format_exception(error)), place(error))
    try:
        return cloudpickle.loads(cloudpickle.dumps(error)), raised
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}"), raised


def place(error: BaseException) -> str:
    """The file and line where the exception was raised, in a server if it came from one; empty if unknown."""
    if isinstance(error.__cause__, ServerTraceback):
        return error.__cause__.place
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


# -- ending a request early --------------------------------------------------------------------------------------------


def abort_in_vllm(server: Any, request_ids: Sequence[str]) -> None:
    """End the requests on the engine's event loop. Runs inside the server."""
    engine = server.engine
    if engine.output_handler is None:  # no request was ever made
        return
    known = engine.output_processor.external_req_ids
    ending = _end_when_known(known, request_ids, functools.partial(_end_in_vllm, engine))
    asyncio.run_coroutine_threadsafe(ending, engine.output_handler.get_loop())


async def _end_in_vllm(engine: Any, request_ids: list[str]) -> None:
    """End requests so that answers have all their tokens: with ``held-outputs`` the engine's core has the last."""
    core = sys.modules.get("vllm.v1.engine.core")  # the engine's process loads the same plug-in
    loop = getattr(getattr(core, "EngineCoreProc", None), "run_busy_loop", None)
    if getattr(engine, HOLDS, True) and getattr(loop, HOLDS, False):
        inner = [one for name in request_ids for one in engine.output_processor.external_req_ids.get(name, ())]
        try:
            await engine.engine_core.call_utility_async("abort_and_answer", inner)
            return
        except Exception as error:  # the plug-in is not loaded there, so nothing is held back either
            setattr(engine, HOLDS, False)
            logger.warning(
                "vLLM's engine did not end requests by itself (%s); its front end does. If the patch held-outputs is "
                "missing there: install goldilocks-rl again, or name goldilocks-patches in VLLM_PLUGINS",
                error,
            )
    await engine.abort(request_ids)


def abort_in_sglang(server: Any, request_ids: Sequence[str]) -> None:
    """End the requests on the engine's event loop. Runs inside the server; SGLang ignores ids it does not know yet."""
    manager = server.tokenizer_manager

    async def end(names: list[str]) -> None:
        for name in names:
            ending = manager.abort_request(name)
            if inspect.isawaitable(ending):
                await ending

    if manager.event_loop is not None:  # else no request was ever made
        ending = _end_when_known(manager.rid_to_state, request_ids, end)
        asyncio.run_coroutine_threadsafe(ending, manager.event_loop)


async def _end_when_known(
    known: Container[str], request_ids: Sequence[str], end: Callable[[list[str]], Awaitable[Any]]
) -> None:
    """Call ``end`` with each request as soon as the engine knows it; give up after ``TRIES``."""
    left = list(request_ids)
    for _ in range(TRIES):
        if found := [name for name in left if name in known]:
            await end(found)
            left = [name for name in left if name not in found]
        if not left:
            return
        await asyncio.sleep(PAUSE_S)


# One message for all requests of a server: a busy server answers a call in tens of milliseconds, and a pause ends a
# thousand requests. Requests at any other engine run to their end.
ASK: dict[str, Callable[[Any, Sequence[str]], None]] = {
    "transformers": lambda server, request_ids: server.abort_requests.remote(request_ids),
    "vllm": lambda server, request_ids: server.__ray_call__.remote(abort_in_vllm, request_ids),
    "sglang": lambda server, request_ids: server.__ray_call__.remote(abort_in_sglang, request_ids),
}


class Aborts:
    """Asks servers to end requests, and counts the answers that ended early because of it."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._ask = ASK.get(engine)
        self.asked = self.ended = self.tokens = 0
        self._warned = False

    def ask(self, server: Any, request_ids: Sequence[str]) -> bool:
        """Ask ``server`` to end the requests; return False where the engine has no way to do so."""
        if self._ask is None:
            return False
        self._ask(server, request_ids)
        return True

    def answered(self, stop_reason: str | None, tokens: int) -> None:
        """Count the answer, of ``tokens`` tokens, to a request that was asked to end."""
        self.asked += 1
        if stop_reason in ENDED:
            self.ended += 1
            self.tokens += tokens
        if self.asked >= SURE_AFTER and not self.ended and not self._warned:
            self._warned = True
            logger.warning(
                "none of %d aborts ended an answer: rollout.name=%s cannot abort; cancelled requests run to their end",
                self.asked,
                self._engine,
            )
