"""The one thread that drives an engine, and the coroutines that wait for it.

Only this thread touches the engine; everyone else sends it functions to call. Every request ends: with its generation,
with the error that refused it, or, when the engine itself fails, with the reason of that failure, which from then on
answers every call. Nothing waits on a thread that is gone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from goldilocks.engine.engine import Engine
from goldilocks.engine.request import Generation, SamplingParams

Result = TypeVar("Result")
Command = Callable[[], None]


class EngineFailed(RuntimeError):
    """The engine raised while it was generating; its state is unknown and it is not used again."""


class EngineLoop:
    """Runs ``engine`` in a thread of its own until ``close``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._waiting: dict[str, Future[Generation]] = {}
        self._failure: EngineFailed | None = None
        self._sending = threading.Lock()  # nothing is sent after the command that ends the thread
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rollout-engine", daemon=True)
        self._thread.start()

    async def generate(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> Generation:
        """The generation of one request; ``ValueError`` where the engine refuses it."""
        future: Future[Generation] = Future()

        def submit() -> None:
            try:
                self._engine.submit(request_id, prompt_ids, params)
            except Exception as error:
                future.set_exception(error)
            else:
                self._waiting[request_id] = future

        self._send(submit, future)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.call(lambda engine: engine.abort(request_id))
            raise

    def call(self, function: Callable[[Engine], Result]) -> Future[Result]:
        """Call ``function`` with the engine, between two of its steps."""
        future: Future[Result] = Future()

        def command() -> None:
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._send(command, future)
        return future

    def in_flight(self) -> list[str]:
        """The ids of the requests that have not ended."""
        return list(self._waiting)

    def close(self) -> None:
        """End the thread after what was sent before; requests in flight fail, later calls are refused."""
        with self._sending:
            self._closed = True
            self._commands.put(None)
        self._thread.join()

    def _send(self, command: Command, future: Future[Result]) -> None:
        def unless_failed() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._failure is not None:
                future.set_exception(self._failure)
            else:
                command()

        with self._sending:
            if self._closed:
                raise EngineFailed("the rollout engine was closed")
            self._commands.put(unless_failed)

    def _run(self) -> None:
        while True:
            # A failed engine has no steps to take: the thread stays to answer every call with the reason.
            idle = self._failure is not None or not self._engine.busy
            for command in self._received(block=idle):
                if command is None:
                    self._fail(EngineFailed("the rollout engine was closed"))
                    return
                command()
            if self._failure is None and self._engine.busy:
                self._step()

    def _received(self, block: bool) -> Iterable[Command | None]:
        """What has been sent so far; waits for the first if there is nothing else to do."""
        if block:
            yield self._commands.get()
        while not self._commands.empty():
            yield self._commands.get()

    def _step(self) -> None:
        try:
            ended = self._engine.step()
        except Exception as error:
            failure = EngineFailed(f"the rollout engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)
            return
        for generation in ended:
            self._waiting.pop(generation.request_id).set_result(generation)

    def _fail(self, failure: EngineFailed) -> None:
        self._failure = failure
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(failure)
