"""A time limit for reward functions: one that hangs fails its rollout, and the run goes on.

Invariant: every call ends within ``timeout_s``, with the function's result or with an error that names the function. A
thread is used again once its call has returned; a call that times out keeps its thread and its place in the room, so
that no more functions run than the room has places. Threads are daemons.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

TIMEOUT_S = 60.0
AT_ONCE = 32  # calls running at the same time in one process, as in Python's own thread pool

Function = Callable[..., Any]
Leave = Callable[[], None]  # gives a place back


class RewardTimeout(RuntimeError):
    """A reward function that did not return in time."""


@dataclass(frozen=True)
class LimitedReward:
    """A reward function, plain or a coroutine function, and the name that its errors have."""

    name: str
    call: Function
    is_async: bool

    @classmethod
    def of(cls, function: Function, name: str = "", **arguments: Any) -> LimitedReward:
        """Return the function with these arguments, which every call has."""
        named = name or getattr(function, "__name__", type(function).__name__)
        return cls(named, partial(function, **arguments), _is_async(function))

    async def within(self, timeout_s: float, arguments: dict[str, Any], leave: Leave) -> Any:
        """Call the function under the time limit; ``leave`` is called when it has ended, a plain one perhaps later."""
        call = partial(self.call, **arguments)
        try:
            return await asyncio.wait_for(call() if self.is_async else _in_thread(call, leave), timeout_s)
        except asyncio.TimeoutError:  # on Python 3.10 not the built-in one
            source = f" (data_source={arguments['data_source']!r})" if "data_source" in arguments else ""
            said = f"the reward function {self.name} did not return within {timeout_s:g} s{source}"
            raise RewardTimeout(said) from None
        finally:
            if self.is_async:
                leave()


def _is_async(function: Function) -> bool:
    """Return whether a call is to be awaited, also of an object whose ``__call__`` is a coroutine function."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class Room:
    """Bounds the calls in flight on each event loop; waiting for a place does not count as a call's time."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, Line] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[Room], tuple[int]]:
        """Another process has event loops of its own."""
        return Room, (self._places,)

    async def enter(self, name: str, timeout_s: float) -> Leave:
        """Wait for a place; return what gives it back. ``name`` is the function's, ``timeout_s`` the limit of a call.

        Calls that hang keep their places. The wait fails when for twice the limit no place was given back: by then
        every call in the room has had its time.
        """
        line = self._lines.setdefault(asyncio.get_running_loop(), Line(self._places))
        if not await line.wait(2 * timeout_s):
            held = f"its places ({self._places}) are held by calls that have not returned"
            raise RewardTimeout(f"the reward function {name} was not called within {2 * timeout_s:g} s: {held}")
        return line.leave


class Line:
    """Those who wait for a place on one event loop."""

    def __init__(self, places: int) -> None:
        self._free = asyncio.Semaphore(places)
        self._left = 0  # places given back so far

    async def wait(self, patience_s: float) -> bool:
        """Take a place; return whether there was one before ``patience_s`` went by without any given back."""
        before = None
        while before != self._left:
            before = self._left
            with contextlib.suppress(asyncio.TimeoutError):
                return await _at_once_or_within(self._free, patience_s)
        return False

    def leave(self) -> None:
        self._left += 1
        self._free.release()


async def _at_once_or_within(free: asyncio.Semaphore, timeout_s: float) -> bool:
    if not free.locked():  # without the task that a time limit takes
        return await free.acquire()
    return await asyncio.wait_for(free.acquire(), timeout_s)


def _in_thread(call: Function, leave: Leave) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        leave()
        if not result.done():
            result.set_result(value) if error is None else result.set_exception(error)

    def done(value: Any, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # a loop that is closed has nobody who waits
            loop.call_soon_threadsafe(settle, value, error)

    (_idle.pop() if _idle else Thread()).run(call, done)
    return result


class Thread:
    """Runs one call at a time, and is idle between calls."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Function, Function]] = SimpleQueue()
        threading.Thread(target=self._work, name="reward", daemon=True).start()

    def run(self, call: Function, done: Function) -> None:
        """``done`` is called with the call's value and error."""
        self._calls.put((call, done))

    def _work(self) -> None:
        while True:
            call, done = self._calls.get()
            value, error = None, None
            try:
                value = call()
            except BaseException as raised:
                error = raised
            _idle.append(self)
            done(value, error)
            del call, done, value, error  # nothing is kept alive until the next call


_idle: list[Thread] = []
