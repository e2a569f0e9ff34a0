"""A time limit for reward functions: one that hangs fails its rollout, and the run goes on.

Invariant: every call ends within ``timeout_s``, with the function's result or with an error that names the function. A
thread is used again once its call has returned; a call that times out keeps its thread. Threads are daemons.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

TIMEOUT_S = 60.0
AT_ONCE = 32  # calls running at the same time in one worker, as in Python's own thread pool

Function = Callable[..., Any]


class RewardTimeout(RuntimeError):
    """A reward function that did not return in time."""


def guarded(reward: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """verl's ``reward.custom_reward_function``, wrapped: the same keys, for the same function under a time limit."""
    inner = {"path": reward["path"], "name": reward["name"], "reward_kwargs": dict(reward.get("reward_kwargs") or {})}
    return {
        "path": f"pkg://{__name__}",
        "name": compute_score.__name__,
        "reward_kwargs": {"guarded_function": inner, "timeout_s": timeout_s},
    }


def is_guarded(reward: Mapping[str, Any]) -> bool:
    """Whether ``reward.custom_reward_function`` was wrapped by ``guarded``."""
    return bool(reward["path"] == f"pkg://{__name__}")


async def compute_score(*, guarded_function: Mapping[str, Any], timeout_s: float, **arguments: Any) -> Any:
    """Call the function under the time limit; this is what verl sees."""
    function = _known(guarded_function)
    call = partial(function.call, **arguments)
    try:
        async with _room():
            running = call() if function.is_async else _in_thread(call)
            return await asyncio.wait_for(running, timeout_s)
    except asyncio.TimeoutError:  # on Python 3.10 not the built-in one
        raise RewardTimeout(
            f"the reward function {function.name} of {function.path} did not return within {timeout_s:g} s "
            f"(data_source={arguments.get('data_source')!r})"
        ) from None


@dataclass(frozen=True)
class Loaded:
    """A reward function with the arguments that the config gives it."""

    path: str
    name: str
    call: Function
    is_async: bool


_loaded: dict[int, tuple[Mapping[str, Any], Loaded]] = {}


def _known(config: Mapping[str, Any]) -> Loaded:
    """Load the function once for a config, which is the same object at every call: reading it takes long."""
    if id(config) not in _loaded:
        path, name, arguments = config["path"], config["name"], config["reward_kwargs"]
        function = _load(path, name)
        loaded = Loaded(path, name, partial(function, **arguments), inspect.iscoroutinefunction(function))
        _loaded[id(config)] = config, loaded  # the config is kept, so that no other object gets its id
    return _loaded[id(config)][1]


@cache
def _load(path: str, name: str) -> Function:
    from verl.utils.import_utils import load_extern_object

    function: Any = load_extern_object(module_path=path, object_name=name)
    return function


_rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _room() -> asyncio.Semaphore:
    """Bounds the calls in flight on this event loop; waiting for a place does not count as a call's time."""
    return _rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE))


async def _in_thread(call: Function) -> Any:
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not result.done():
            result.set_result(value) if error is None else result.set_exception(error)

    def done(value: Any, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # a loop that is closed has nobody who waits
            loop.call_soon_threadsafe(settle, value, error)

    (_idle.pop() if _idle else Thread()).run(call, done)
    return await result


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
