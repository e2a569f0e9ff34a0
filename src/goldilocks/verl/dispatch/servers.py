"""What rollout servers are asked: many requests in one message, and to end a request early.

The ``abort_request`` of verl 0.9.1 and of its main does nothing on vLLM 0.12 and later: it looks a request up by verl's
id, and vLLM keeps requests by an id of its own. verl's SGLang server has no such method. So the engine inside the
server actor is asked; its prefix cache stays. Servers import this module, so it imports nothing of verl or torch.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Coroutine, Mapping, Sequence
from typing import Any
from uuid import uuid4

from ray import cloudpickle

from goldilocks.engine.verl_server.answers import Answers, Outcome, Packed, Requests, Unanswered
from goldilocks.verl.fields import HOLDS

logger = logging.getLogger(__name__)

TRIES, PAUSE_S = 20, 0.05  # an abort may reach the engine before its request does
SURE_AFTER = 16  # aborts without effect after which a warning says so
ENDED = ("aborted", "abort")  # the stop reasons of a request that was ended early
IDLE_TO_SLEEP = ("sglang",)  # engines that assert that they have no request when their memory is released


# -- many requests in one message --------------------------------------------------------------------------------------


def takes_many(server: Any) -> bool:
    """Whether the actor of this handle takes many requests in one message."""
    return hasattr(server, "generate_all")


async def exchanged(server: Any, requests: Requests) -> AsyncIterator[Answers]:
    """Send the requests in one message and yield their outcomes as they come. One that cannot be read fails alone."""
    name = uuid4().hex
    reply, failed = _sent(server, name, requests)
    if failed:
        yield Answers(failed)
    left = len(requests) - len(failed)
    while left:
        answers: Answers = await reply
        left -= len(answers.outcomes)
        outcomes: list[Outcome] = []
        for request, outcome in answers.outcomes:
            try:  # our own server does not pack its outcomes
                outcomes.append((request, outcome.outcome() if isinstance(outcome, Packed) else outcome))
            except Exception as error:
                outcomes.append((request, error))
        yield answers._replace(outcomes=outcomes)
        if left:
            reply = server.more_answers.remote(name)


def _sent(server: Any, name: str, requests: Requests) -> tuple[Any, list[Outcome]]:
    """Send the requests that can be pickled; return the pending reply, and the others with their errors."""
    try:
        return server.generate_all.remote(name, requests), []
    except Exception:
        good: Requests = []
        failed: list[Outcome] = []
        for request in requests:
            try:
                cloudpickle.dumps(request)
                good.append(request)
            except Exception as error:
                failed.append((request[0], error))
        if not failed:
            raise
    return (server.generate_all.remote(name, good) if good else None), failed


async def collected(calls: Mapping[str, Coroutine[Any, Any, Any]]) -> AsyncIterator[Answers]:
    """Await one call for each request; yield their outcomes as they come."""
    batch = Unanswered(calls)
    while batch.left:
        yield Answers(await batch.more())


# -- ending a request early --------------------------------------------------------------------------------------------


def abort_in_vllm(server: Any, request_ids: Sequence[str]) -> None:
    """End the requests on the engine's event loop. Runs inside the server."""
    engine = server.engine
    if engine.output_handler is None:  # no request was ever made
        return
    requests = engine.output_processor
    known = getattr(requests, "external_req_ids", requests.request_states)
    ending = _end_when_known(known, request_ids, functools.partial(_end_in_vllm, engine))
    asyncio.run_coroutine_threadsafe(ending, engine.output_handler.get_loop())


async def _end_in_vllm(engine: Any, request_ids: list[str]) -> None:
    """End requests so that answers have all their tokens: with ``held-outputs`` the engine's core has the last."""
    if _core_holds(engine):
        by_name = engine.output_processor.external_req_ids
        inner = [one for name in request_ids for one in by_name.get(name, ())]
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


def _core_holds(engine: Any) -> bool:
    """Whether the engine's process holds outputs back, as far as this process can know."""
    core = sys.modules.get("vllm.v1.engine.core")
    loop = getattr(getattr(core, "EngineCoreProc", None), "run_busy_loop", None)
    return bool(getattr(engine, HOLDS, True) and getattr(loop, HOLDS, False))


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
