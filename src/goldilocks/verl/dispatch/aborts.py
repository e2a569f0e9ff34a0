"""Ends a request early at each kind of rollout server, and counts whether the servers do so.

The ``abort_request`` of verl 0.9.1, and of its main, does nothing on vLLM 0.12 and later: it looks a request up by
verl's id, and vLLM keeps requests by an id of its own. verl's SGLang server has none. So the engine inside the server
actor is asked; the prefix cache stays. Servers import this module, so it imports nothing of verl or torch.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import Any

from goldilocks.hashing import is_known
from goldilocks.verl.fields import HOLDS

logger = logging.getLogger(__name__)

BROKEN_ON_VLLM = ("cc93c245b4f855bf", "d62e23ff08fead96")  # verl's methods that do not work; any other is used
TRIES, PAUSE_S = 20, 0.05  # an abort may come before the engine has seen the request
SURE_AFTER = 16  # aborts without effect after which a warning says so
ENDED = ("aborted", "abort")  # what servers call it
IDLE_TO_SLEEP = ("sglang",)  # engines that assert that they have no request when memory is released


def abort_in_vllm(server: Any, request_ids: Sequence[str]) -> None:
    """Runs inside the server: end the requests on the engine's own event loop."""
    own, engine = type(server).abort_request, server.engine
    if engine.output_handler is None:  # no request was ever made
        return
    if not is_known(own, BROKEN_ON_VLLM) and not _core_holds(engine):
        ending = _each(own, server, request_ids)
    else:
        requests = engine.output_processor
        known = getattr(requests, "external_req_ids", requests.request_states)
        ending = _end_when_known(known, request_ids, functools.partial(_end_in_vllm, engine))
    asyncio.run_coroutine_threadsafe(ending, engine.output_handler.get_loop())


def abort_in_sglang(server: Any, request_ids: Sequence[str]) -> None:
    """Runs inside the server: as ``abort_in_vllm``; SGLang forgets an abort of a request that it does not know yet."""
    manager = server.tokenizer_manager

    async def end(names: list[str]) -> None:
        for name in names:
            ending = manager.abort_request(name)
            if inspect.isawaitable(ending):
                await ending

    if manager.event_loop is not None:  # else no request was ever made
        ending = _end_when_known(manager.rid_to_state, request_ids, end)
        asyncio.run_coroutine_threadsafe(ending, manager.event_loop)


async def _end_in_vllm(engine: Any, request_ids: list[str]) -> None:
    """End requests so that their answers have all their tokens, which with ``held-outputs`` the engine's core has."""
    if _core_holds(engine):
        by_name = engine.output_processor.external_req_ids
        inner = [one for name in request_ids for one in by_name.get(name, ())]
        try:
            await engine.engine_core.call_utility_async("abort_and_answer", inner)
            return
        except Exception as error:  # the plug-in is not loaded there, so that nothing is kept back either
            setattr(engine, HOLDS, False)
            logger.warning(
                "vLLM's engine did not end requests by itself (%s); its front end does. If the patch held-outputs is "
                "missing there: install goldilocks-rl again, or name goldilocks-patches in VLLM_PLUGINS",
                error,
            )
    await engine.abort(request_ids)


def _core_holds(engine: Any) -> bool:
    """Whether the engine's process keeps outputs back, as far as this one can know."""
    core = sys.modules.get("vllm.v1.engine.core")
    loop = getattr(getattr(core, "EngineCoreProc", None), "run_busy_loop", None)
    return bool(getattr(engine, HOLDS, True) and getattr(loop, HOLDS, False))


async def _each(own: Callable[..., Any], server: Any, request_ids: Sequence[str]) -> None:
    await asyncio.gather(*(own(server, name, reset_prefix_cache=False) for name in request_ids))


async def _end_when_known(
    known: Container[str], request_ids: Sequence[str], end: Callable[[list[str]], Awaitable[Any]]
) -> None:
    left = list(request_ids)
    for _ in range(TRIES):
        if found := [name for name in left if name in known]:
            await end(found)
            left = [name for name in left if name not in found]
        if not left:
            return
        await asyncio.sleep(PAUSE_S)


# One message for all requests of a server: its process answers a call in tens of milliseconds while its engine is busy,
# and a pause ends a thousand requests. The requests of any other engine run to their end.
ASK: dict[str, Callable[[Any, Sequence[str]], None]] = {
    "transformers": lambda server, request_ids: server.abort_requests.remote(request_ids),
    "vllm": lambda server, request_ids: server.__ray_call__.remote(abort_in_vllm, request_ids),
    "sglang": lambda server, request_ids: server.__ray_call__.remote(abort_in_sglang, request_ids),
}


class Aborts:
    """Asks for aborts and counts those that ended an answer."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._ask = ASK.get(engine)
        self.asked = self.ended = self.tokens = 0
        self._said = False

    def ask(self, server: Any, request_ids: Sequence[str]) -> bool:
        """Ask ``server`` to end the requests; False where the engine has no way to do so."""
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
        if self.asked >= SURE_AFTER and not self.ended and not self._said:
            self._said = True
            logger.warning(
                "none of %d aborts ended an answer: rollout.name=%s cannot abort; cancelled requests run to their end",
                self.asked,
                self._engine,
            )
