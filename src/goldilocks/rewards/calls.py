"""Calls of reward functions as ``goldilocks.rewards`` says, on V1, V0, TRL and in ``goldilocks pass-rates``.

Invariant: every call that is begun is counted, whatever becomes of it. A function that waits for its next try holds no
place among those that run.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import pickle
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from time import perf_counter
from typing import Any

import numpy as np

from goldilocks.config.sections import REWARDS, OnFailure, RewardCalls, reward_calls
from goldilocks.errors import refuse, require
from goldilocks.rewards.limited import Function, Places, find, in_thread

logger = logging.getLogger(__name__)

PATH = f"pkg://{__name__}"
VERLS_OWN = {"path": "pkg://verl.utils.reward_score", "name": "default_compute_score"}  # where the config names none
TASKS = "pkg://goldilocks.tasks."  # modules with graders of ours
SCORE = "score"  # the reward, in a function's result that has more
TIMEOUT_S = 60.0
AT_ONCE, PROCESSES = 32, 8  # calls of one function at a time, and in processes, unless ``concurrency`` is set


class RewardTimeout(RuntimeError):
    """A reward function did not return in time."""


class RewardFailed(RuntimeError):
    """A reward function has failed for the last time, and ``on_failure=error`` ends the run."""


class RewardCosts(dict[str, float]):
    """What the reward functions of this process have cost since it was last read."""

    def add(self, **counts: float) -> None:
        self.update({name: self.get(name, 0) + count for name, count in counts.items()})

    def read(self) -> dict[str, float]:
        """Return the counts; the next reading begins at none."""
        counts = dict(self)
        self.clear()
        return counts


spent = RewardCosts()


class RewardCaller:
    """Calls a reward function as ``calls`` says; awaited with an answer's arguments.

    ``where`` is the path and the name by which another process finds the function; empty: only this process has it.
    """

    def __init__(
        self, name: str, function: Function, where: Sequence[str], calls: RewardCalls, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._name, self._function, self._where, self._calls = name, function, where, calls
        self._timeout_s = calls.timeout or timeout_s
        self._in_use = calls.in_use
        self._spent = spent if self._in_use else RewardCosts()
        inner = function.func if isinstance(function, partial) else function
        self._is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
        self._is_quick = getattr(function, "is_quick", lambda **_: False)  # whether a call only compares texts
        self._places: dict[asyncio.AbstractEventLoop, Places] = {}
        self._last: Any = None  # result, whose form a failed one takes

    async def __call__(self, **arguments: Any) -> Any:
        """Return the function's result; where every try failed, do what ``on_failure`` says."""
        calls = self._calls
        for attempt in range(calls.retries + 1):
            if attempt:
                self._spent.add(retries=1)
                await asyncio.sleep(calls.backoff * 2 ** (attempt - 1))
            try:
                result = await self._call(arguments)
                score_of(self._name, result, finite=self._in_use)
                if isinstance(result, Mapping):
                    self._spent.add(cost=float(result.get("cost") or 0.0))
                self._last = result
                return result
            except Exception as error:
                failed = error
        self._spent.add(failures=1)
        said = f"the reward {self._name} failed {calls.retries + 1} times, the last time with {failed!r}"
        if self._in_use:
            logger.warning("%s: %s", said, calls.on_failure)
        if calls.on_failure == OnFailure.ERROR:
            raise RewardFailed(said) from failed
        if calls.on_failure == OnFailure.FAIL:
            raise failed
        if not isinstance(self._last, Mapping):
            return 0.0
        # verl wants the same names of every answer. Numbers are 0; the texts were another answer's.
        return {**{name: 0.0 if is_number(value) else None for name, value in self._last.items()}, SCORE: 0.0}

    async def _call(self, arguments: dict[str, Any]) -> Any:
        """Call a coroutine function here, a plain one in a process, or in a thread where no process can have it."""
        if self._is_quick(**arguments):
            self._spent.add(calls=1)
            return self._function(**arguments)
        loop = asyncio.get_running_loop()
        if loop not in self._places:
            self._places = {old: places for old, places in self._places.items() if not old.is_closed()}
            in_processes = self._where and not self._is_async
            most = self._calls.concurrency or (PROCESSES if in_processes else AT_ONCE)
            self._places[loop] = Places(1 if in_processes else most, most)
        places = self._places[loop]
        process = await places.take()
        try:
            if self._is_async:
                return await self._in_time(self._function(**arguments))
            if message := self._message(arguments):
                process = process or await places.start(*self._where)
                value, error = await self._in_time(process.ask(message))
            else:
                value, error = await self._in_time(in_thread(self._function, arguments))
        except BaseException:
            process = process and process.end()  # another is started when the place needs one
            raise
        finally:
            places.idle.put_nowait(process)
        if error is not None:
            raise error
        return value

    def _message(self, arguments: dict[str, Any]) -> bytes | None:
        """Return the arguments for a process, or None where no process can have them or the function."""
        try:
            if self._where:
                return pickle.dumps(arguments)
            _say_in_thread(self._name, "other processes cannot import it")
        except Exception as error:
            _say_in_thread(self._name, f"its arguments cannot be sent to another process, {error}")
        return None

    async def _in_time(self, call: Awaitable[Any]) -> Any:
        """Await a call. One that takes too long is cancelled; a ``TimeoutError`` of its own is an error like others."""
        task, started = asyncio.ensure_future(call), perf_counter()
        try:
            done, _ = await asyncio.wait([task], timeout=self._timeout_s)
        finally:
            task.cancel()  # has no effect on a call that has ended
            self._spent.add(calls=1, seconds=perf_counter() - started)
        if not done:
            raise RewardTimeout(f"the reward function {self._name} did not return within {self._timeout_s:g} s")
        return task.result()


@cache  # said once
def _say_in_thread(name: str, reason: str) -> None:
    said = "the reward %s runs in a thread: %s. Its time limit does not hold while it keeps the interpreter busy"
    logger.warning(said, name, reason)


async def weighted_sum(functions: Mapping[str, tuple[Function, float]], **arguments: Any) -> dict[str, Any]:
    """Return the weighted sum of several rewards, each score under its name, and what else the functions returned."""
    made = (function(**arguments) for function, _ in functions.values())
    results: list[Any] = await asyncio.gather(*made, return_exceptions=True)
    for result in results:  # raised when all have ended, so that what they cost is counted
        if isinstance(result, BaseException):
            raise result
    scores = {name: score_of(name, result) for name, result in zip(functions, results, strict=True)}
    others: dict[str, Any] = {}
    for result in reversed(results):  # of two that return a value of one name, the first wins
        others |= result if isinstance(result, Mapping) else {}
    return {**others, **scores, SCORE: math.fsum(functions[name][1] * score for name, score in scores.items())}


def score_of(name: str, result: Any, finite: bool = True) -> float:
    """Return the score of a function's result, a number or a mapping that has one."""
    score: Any = result.get(SCORE) if isinstance(result, Mapping) else result
    try:
        number = float(score)
        fits = math.isfinite(number) or not finite
    except (TypeError, ValueError):
        fits = False
    if not fits:
        refuse(f"the result of the reward {name}", result, f"a finite number, or a mapping with one as {SCORE!r}")
    return number


def is_number(value: object) -> bool:
    """Return whether a value of a function's result is one number; numpy and torch have their own."""
    if isinstance(value, str | bytes):  # numpy's texts have a dtype too
        return False
    return isinstance(value, bool | int | float) or (hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0)


def guard(config: Any, timeout_s: float = TIMEOUT_S, workers: int | None = None) -> None:
    """Have verl's config name ``compute_score`` here, with the user's own functions in its arguments.

    verl loads ``reward.custom_reward_function`` by its path in every process that grades. ``workers`` is how many do so
    at the same time; None: verl's agent loops, or its reward workers. verl's default grader is left to verl unless the
    section is set: its processes would each import the whole of verl, and a reward model would not be asked.
    """
    from omegaconf import open_dict

    reward, calls = config.reward.custom_reward_function, reward_calls(config)
    if reward.path != PATH and (reward.path or calls.in_use):
        workers = workers or max(config.actor_rollout_ref.rollout.agent.num_workers, config.reward.num_workers)
        with open_dict(config):
            config.reward.custom_reward_function = guarded(reward, calls, timeout_s, workers)


def guard_if_asked(config: Any) -> None:
    """The same on verl's own command line, where ``goldilocks.rewards`` asks for it, or a grader of ours computes."""
    if reward_calls(config).in_use or str(config.reward.custom_reward_function.path).startswith(TASKS):
        guard(config)


def guarded(
    reward: Mapping[str, Any], calls: RewardCalls | None = None, timeout_s: float = TIMEOUT_S, workers: int = 1
) -> dict[str, Any]:
    """Return ``reward.custom_reward_function`` for the same function under a time limit, and those of the section."""
    from omegaconf import OmegaConf

    calls = calls or RewardCalls()
    if calls.concurrency is not None:
        accepted = f"{workers} or more, one for each worker that grades"
        require(calls.concurrency >= workers, f"{REWARDS}.concurrency", calls.concurrency, accepted)
        calls = replace(calls, concurrency=calls.concurrency // workers)
    given = reward if reward.get("path") else VERLS_OWN, asdict(calls), timeout_s
    packed = json.dumps(given, default=partial(OmegaConf.to_container, resolve=True))
    return {"path": PATH, "name": compute_score.__name__, "reward_kwargs": {"packed": packed}}


async def compute_score(packed: str, **arguments: Any) -> Any:
    """Call the functions of the config; this is what verl sees."""
    return await reward_of(packed)[0](**arguments)


@cache
def reward_of(packed: str) -> tuple[Function, RewardCalls]:
    """Return what is awaited with an answer's arguments, and the section that it follows."""
    own, given, timeout_s = json.loads(packed)
    calls = RewardCalls(**given)

    def function(path: str, name: str, reward_kwargs: Mapping[str, Any] | None = None, **_: Any) -> Function:
        called = RewardCaller(f"{name} of {path}", find(path, name), (path, name), calls, timeout_s)
        return partial(called, **(reward_kwargs or {}))

    if not calls.functions:
        return function(**own), calls
    parts = {name: (function(**(one if one["path"] else own)), one["weight"]) for name, one in calls.functions.items()}
    return partial(weighted_sum, parts), calls


def judge(function: Function, **calls: Any) -> Judge:
    """Return a reward function for TRL of one that grades one answer.

    ``function(completion, **row)`` is called with an answer and the columns of its row, and returns a number; it may be
    a coroutine function. ``calls`` are keys of the section: ``judge(ask, concurrency=16, timeout=20, retries=3)``.
    """
    return Judge(function, reward_calls({"goldilocks": {"rewards": {"timeout": TIMEOUT_S, **calls}}}))


class Judge:
    """A reward function for TRL; processes that are spawned are sent it, which a function of a function cannot be."""

    def __init__(self, function: Function, calls: RewardCalls) -> None:
        self._made_of = function, calls
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        path, name = f"pkg://{getattr(function, '__module__', '')}", getattr(function, "__qualname__", "")
        try:  # a function of a script, a closure and an object are only in this process
            found = not path.endswith("main__") and find(path, name) is function  # a spawned process says __mp_main__
        except (ImportError, AttributeError):
            found = False
        self._reward = RewardCaller(self.__name__, function, (path, name) if found else (), calls)

    def __reduce__(self) -> tuple[type[Judge], tuple[Any, ...]]:
        return Judge, self._made_of

    async def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        rows: list[dict[str, Any]] = [{} for _ in completions]
        for name, column in columns.items():
            several = column.ndim > 0 if isinstance(column, np.ndarray) else isinstance(column, Sequence)
            if several and not isinstance(column, str) and len(column) == len(rows):
                for row, value in zip(rows, column, strict=True):
                    row[name] = value
        return list(await asyncio.gather(*map(self._grade, completions, rows)))

    async def _grade(self, completion: Any, row: dict[str, Any]) -> float | None:
        try:
            return score_of(self.__name__, await self._reward(completion=completion, **row))
        except RewardFailed:
            raise
        except Exception:  # logged where the last try failed
            return None

    # What ``inspect`` asks a function for, so that ``iscoroutinefunction``, which TRL calls, says yes.
    __code__ = __call__.__code__
    __defaults__ = __kwdefaults__ = None
