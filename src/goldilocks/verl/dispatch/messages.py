"""Many requests in one message to a rollout server, and their outcomes as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from ray import cloudpickle

from goldilocks.verl.serve.answers import Answers, Batch, Outcome, Packed, Requests


def takes_many(server: Any) -> bool:
    """Whether the actor of this handle takes many requests in one message."""
    return hasattr(server, "generate_all")


async def exchanged(server: Any, requests: Requests) -> AsyncIterator[Answers]:
    """Send the requests in one message; yield their outcomes as they come."""
    name = uuid4().hex
    reply, failed = _sent(server, name, requests)
    if failed:
        yield Answers(failed)
    left = len(requests) - len(failed)
    while left:
        answers: Answers = await reply
        left -= len(answers.outcomes)
        yield answers._replace(outcomes=[(request, _unpacked(outcome)) for request, outcome in answers.outcomes])
        if left:
            reply = server.more_answers.remote(name)


def _sent(server: Any, name: str, requests: Requests) -> tuple[Any, list[Outcome]]:
    """Send the requests that can be pickled; return the pending reply, and those that cannot with the reason."""
    try:
        return server.generate_all.remote(name, requests), []
    except Exception:
        failed = [(request[0], error) for request in requests if (error := _pickling_error(request)) is not None]
        if not failed:
            raise
    names = {request for request, _ in failed}
    left = [request for request in requests if request[0] not in names]
    return (server.generate_all.remote(name, left) if left else None), failed


def _pickling_error(request: Any) -> Exception | None:
    try:
        cloudpickle.dumps(request)
    except Exception as error:
        return error
    return None


def _unpacked(outcome: Any) -> Any:
    """The outcome; our own server's is not packed. One that cannot be read fails alone."""
    try:
        return outcome.outcome() if isinstance(outcome, Packed) else outcome
    except Exception as error:
        return error


async def collected(asked: Mapping[str, Coroutine[Any, Any, Any]]) -> AsyncIterator[Answers]:
    """Await a call for each request; yield their outcomes as they come."""
    batch = Batch(asked)
    while batch.left:
        yield Answers(await batch.more())


class Gathered:
    """Stands for the handle of verl's vLLM server where verl's client calls ``generate``.

    Requests that are made in one turn of the event loop go in one message: those of a wave, those that continue after a
    pause, and those whose places the answers of one message have freed. Requests with more than text go by themselves.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self._unsent: dict[str, tuple[asyncio.Future[Any], list[int], dict[str, Any]]] = {}
        self._exchanges: set[asyncio.Task[None]] = set()
        self.generate = SimpleNamespace(remote=self._generate)

    def _generate(
        self, *, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any
    ) -> Awaitable[Any]:
        if request_id in self._unsent or any(value is not None for value in others.values()):
            text = {"request_id": request_id, "prompt_ids": prompt_ids, "sampling_params": sampling_params}
            alone: Awaitable[Any] = self._server.generate.remote(**text, **others)
            return alone
        loop = asyncio.get_running_loop()
        if not self._unsent:
            loop.call_soon(self._send)
        answer: asyncio.Future[Any] = loop.create_future()
        self._unsent[request_id] = answer, prompt_ids, sampling_params
        return answer

    def _send(self) -> None:
        unsent = {name: one for name, one in self._unsent.items() if not one[0].done()}  # somebody waits for them
        self._unsent = {}
        if not unsent:
            return
        requests = [(name, prompt, params) for name, (_, prompt, params) in unsent.items()]
        waiting = {name: answer for name, (answer, _, _) in unsent.items()}
        task = asyncio.create_task(self._exchange(requests, waiting))
        self._exchanges.add(task)
        task.add_done_callback(self._exchanges.discard)

    async def _exchange(self, requests: Requests, waiting: dict[str, asyncio.Future[Any]]) -> None:
        try:
            async for answers in exchanged(self._server, requests):
                for name, outcome in answers.outcomes:
                    _settle(waiting.pop(name), outcome)
        except Exception as error:  # the server is gone
            for answer in waiting.values():
                _settle(answer, error)


def _settle(answer: asyncio.Future[Any], outcome: Any) -> None:
    if answer.done():  # who waited was cancelled
        return
    if isinstance(outcome, BaseException):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
