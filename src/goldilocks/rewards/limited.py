"""A time limit for reward functions: one that hangs fails its rollout, and the run goes on.

Invariant: every call ends within ``timeout_s``, with the function's result or with an error that names the function. A
thread is used again once its call has returned; a call that times out keeps its thread and its place in the room, so
that no more functions run than the room has places. Threads are daemons.

Most functions compare two texts, which takes less time than waking a thread. So all threads take calls from one queue:
it wakes one thread at a time, which goes on with the next call while the others are still asleep.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
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
            if not self.is_async:
                return await _in_thread(call, leave, timeout_s)
            return await asyncio.wait_for(call(), timeout_s)
        except (asyncio.TimeoutError, TookTooLong) as error:  # on Python 3.10 not the built-in one
            if not self.is_async and not isinstance(error, TookTooLong):
                raise  # the function's own
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
    """Those who wait for a place on one event loop, first come first served."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._left = 0  # places given back so far
        self._waiting: deque[asyncio.Future[bool]] = deque()

    async def wait(self, patience_s: float) -> bool:
        """Take a place; return whether there was one before ``patience_s`` went by without any given back."""
        if self._free:
            self._free -= 1
            return True
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(mine)
        self._lose_patience(mine, patience_s, before=-1)
        try:
            return await mine
        except asyncio.CancelledError:
            if not mine.cancelled() and mine.result():  # the place came as the wait was given up
                self.leave()
            raise

    def _lose_patience(self, mine: asyncio.Future[bool], patience_s: float, before: int) -> None:
        if mine.done():
            return
        if before == self._left:
            mine.set_result(False)
        else:
            look = partial(self._lose_patience, mine, patience_s, self._left)
            timer = asyncio.get_running_loop().call_later(patience_s, look)
            mine.add_done_callback(lambda _: timer.cancel())

    def leave(self) -> None:
        self._left += 1
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(True)
                return
        self._free += 1


class TookTooLong(Exception):
    """A call in a thread that has not returned within its time."""


def _in_thread(call: Function, leave: Leave, timeout_s: float) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        leave()
        timer.cancel()
        if not result.done():
            result.set_result(value) if error is None else result.set_exception(_settable(error))

    def expire() -> None:
        if not result.done():
            result.set_exception(TookTooLong())

    timer = loop.call_later(timeout_s, expire)
    _threads.run(call, partial(_results.setdefault(loop, Results()).add, loop, settle))
    return result


def _settable(error: BaseException) -> BaseException:
    """The error as a future takes it: a future refuses StopIteration, which ``next`` raises where nothing is left."""
    if not isinstance(error, StopIteration):
        return error
    named = RuntimeError(f"the reward function raised {error!r}")
    named.__cause__ = error
    return named


class Results:
    """What calls in threads returned, brought to an event loop, which is woken once for all that came meanwhile."""

    def __init__(self) -> None:
        self._came: deque[Function] = deque()
        self._woken = False

    def add(self, loop: asyncio.AbstractEventLoop, settle: Function, value: Any, error: BaseException | None) -> None:
        """Have the loop call ``settle``; called in any thread."""
        self._came.append(partial(settle, value, error))
        if not self._woken:
            self._woken = True
            try:
                loop.call_soon_threadsafe(self._settle_all)
            except RuntimeError:  # a loop that is closed has nobody who waits; what came would keep it alive
                self._came.clear()
                self._woken = False

    def _settle_all(self) -> None:
        self._woken = False  # first: what comes from here on wakes the loop again
        while self._came:
            self._came.popleft()()


class Threads:
    """As many threads as there were ever calls at a time."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Function, Function]] = SimpleQueue()
        self._count = threading.Lock()
        self._running = self._started = 0

    def run(self, call: Function, done: Function) -> None:
        """``done`` is called with the call's value and error."""
        with self._count:
            self._running += 1
            short = self._running > self._started
            self._started += short
        if short:
            threading.Thread(target=self._work, name="reward", daemon=True).start()
        self._calls.put((call, done))

    def _work(self) -> None:
        while True:
            call, done = self._calls.get()
            value, error = None, None
            try:
                value = call()
            except BaseException as raised:
                error = raised
            with self._count:
                self._running -= 1
            done(value, error)
            del call, done, value, error  # nothing is kept alive until the next call


_threads = Threads()
_results: WeakKeyDictionary[asyncio.AbstractEventLoop, Results] = WeakKeyDictionary()
