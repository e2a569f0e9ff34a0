"""A time limit for reward functions: one that hangs fails its rollout, and the run goes on.

Invariant: every call ends within ``timeout_s`` of its start, with the function's result or with an error that names the
function. A call that times out keeps its thread; threads are daemons, so they do not keep a worker alive.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

TIMEOUT_S = 60.0
AT_ONCE = 32  # calls running at the same time in one worker, as in Python's own thread pool

Function = Callable[..., Any]


def guarded(reward: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """verl's ``reward.custom_reward_function``, wrapped: the same keys, for the same function under a time limit."""
    inner = {"path": reward["path"], "name": reward["name"], "reward_kwargs": dict(reward.get("reward_kwargs") or {})}
    return {
        "path": f"pkg://{__name__}",
        "name": compute_score.__name__,
        "reward_kwargs": {"guarded_function": inner, "timeout_s": timeout_s},
    }


async def compute_score(*, guarded_function: Mapping[str, Any], timeout_s: float, **arguments: Any) -> Any:
    """Call the function under the time limit; this is what verl sees."""
    path, name = guarded_function["path"], guarded_function["name"]
    call = partial(_load(path, name), **arguments, **guarded_function["reward_kwargs"])
    try:
        async with _room():
            running = call() if inspect.iscoroutinefunction(call.func) else _in_thread(call)
            return await asyncio.wait_for(running, timeout_s)
    except TimeoutError:
        raise RuntimeError(
            f"the reward function {name} of {path} did not return within {timeout_s:g} s "
            f"(data_source={arguments.get('data_source')!r})"
        ) from None


@cache
def _load(path: str, name: str) -> Function:
    from verl.utils.import_utils import load_extern_object

    function: Any = load_extern_object(module_path=path, object_name=name)
    return function


@cache
def _room() -> asyncio.Semaphore:
    """Bounds the calls in flight. Waiting here does not count against a call's time."""
    return asyncio.Semaphore(AT_ONCE)


async def _in_thread(call: Function) -> Any:
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            method(value)

    def work() -> None:
        try:
            value = call()
        except BaseException as error:
            loop.call_soon_threadsafe(settle, result.set_exception, error)
        else:
            loop.call_soon_threadsafe(settle, result.set_result, value)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await result
