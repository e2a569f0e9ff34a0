"""The one thread that drives an engine, and the coroutines that wait for it.

Only this thread touches the engine; others send it functions to call. Every request ends: with its generation, with the
error that refused it, or with the failure of the engine, which from then on answers every call.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from goldilocks.engine.engine import Ask, Engine, Generation, SamplingParams

Result = TypeVar("Result")
Command = Callable[[], None]
Outcome = tuple[str, Generation | Exception]  # of the request with this id


class EngineFailed(RuntimeError):
    """The engine raised while it was generating; its state is unknown and it is not used again."""


class OutcomeQueue:
    """Outcomes on their way from the engine's thread to a coroutine, which is woken once for all new ones."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._lock = threading.Lock()
        self._unseen: list[Outcome] = []
        self.awaited = True

    def put(self, outcomes: list[Outcome]) -> None:
        """Called by the engine's thread."""
        with self._lock:
            first = not self._unseen
            self._unseen += outcomes
        if first:
            with contextlib.suppress(RuntimeError):  # a loop that is closed has nobody who waits
                self._loop.call_soon_threadsafe(self._news.set)

    async def get(self) -> list[Outcome]:
        """Return the outcomes since the last call; wait until there is one."""
        await self._news.wait()
        self._news.clear()
        with self._lock:
            seen, self._unseen = self._unseen, []
        return seen


class EngineLoop:
    """Runs ``engine`` in a thread of its own until ``close``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._waiting: dict[str, OutcomeQueue] = {}
        self._failure: EngineFailed | None = None
        self._sending = threading.Lock()  # nothing is sent after the command that ends the thread
        self._closed = False
        self.busy_s = 0.0  # seconds that the engine has spent on its steps
        self._thread = threading.Thread(target=self._run, name="rollout-engine", daemon=True)
        self._thread.start()

    async def generate(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> Generation:
        """The generation of one request; ``ValueError`` where the engine refuses it."""
        async with contextlib.aclosing(self.generate_all([Ask(request_id, prompt_ids, params)])) as answers:
            ((_, outcome),) = await anext(answers)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def generate_all(self, asks: list[Ask]) -> AsyncGenerator[list[Outcome], None]:
        """Submit the requests between two steps; yield the outcomes as they come, until all have."""
        outcomes, left = OutcomeQueue(), {ask.request_id for ask in asks}
        self._send(lambda: self._submit(asks, outcomes))
        try:
            while left:
                ended = await outcomes.get()
                left.difference_update(request_id for request_id, _ in ended)
                yield ended
        finally:  # the caller may have given up, before the engine has seen the requests or after
            outcomes.awaited = False
            for request_id in left:
                self.call(partial(Engine.abort, request_id=request_id))

    def _submit(self, asks: list[Ask], outcomes: OutcomeQueue) -> None:
        refused: list[Outcome] = []
        for ask in asks if outcomes.awaited else ():
            try:
                if self._failure is not None:
                    raise self._failure
                self._engine.submit(ask.request_id, ask.prompt_ids, ask.params)
                self._waiting[ask.request_id] = outcomes
            except Exception as error:
                refused.append((ask.request_id, error))
        if refused:
            outcomes.put(refused)

    def call(self, function: Callable[[Engine], Result]) -> Future[Result]:
        """Call ``function`` with the engine, between two of its steps."""
        future: Future[Result] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._failure is not None:
                    raise self._failure
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._send(command)
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

    def _send(self, command: Command) -> None:
        with self._sending:
            if self._closed:
                raise EngineFailed("the rollout engine was closed")
            self._commands.put(command)

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
        """Yield the commands sent so far; ``block`` waits for the first."""
        if block:
            yield self._commands.get()
        while not self._commands.empty():
            yield self._commands.get()

    def _step(self) -> None:
        started = time.perf_counter()
        try:
            ended = self._engine.step()
        except Exception as error:
            failure = EngineFailed(f"the rollout engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)
            return
        self.busy_s += time.perf_counter() - started
        self._deliver((generation.request_id, generation) for generation in ended)

    def _deliver(self, ended: Iterable[Outcome]) -> None:
        """Hand over outcomes, once to each that waits."""
        parts: dict[OutcomeQueue, list[Outcome]] = {}
        for outcome in ended:
            parts.setdefault(self._waiting.pop(outcome[0]), []).append(outcome)
        for outcomes, part in parts.items():
            outcomes.put(part)

    def _fail(self, failure: EngineFailed) -> None:
        self._failure = failure
        self._deliver([(request_id, failure) for request_id in self._waiting])
