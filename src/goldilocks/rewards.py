"""Reward functions, called as ``goldilocks.rewards`` says, on V1, V0, TRL and in ``goldilocks pass-rates``.

``judge`` makes one for TRL's trainers. Plain functions run in processes, which can be killed, so that a time limit
holds whatever they do. Invariant: every call that is begun is counted, whatever becomes of it. A call that waits for
its next try holds no place among those that run.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import json
import logging
import math
import os
import pickle
import runpy
import signal
import subprocess
import sys
import traceback
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import cache, partial
from multiprocessing.connection import Connection, Pipe
from operator import attrgetter
from threading import Thread
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from goldilocks.config.sections import REWARDS, OnFailure, RewardCalls, reward_calls
from goldilocks.errors import require

logger = logging.getLogger(__name__)

PATH = f"pkg://{__name__}"
VERLS_OWN = {"path": "pkg://verl.utils.reward_score", "name": "default_compute_score"}  # where the config names none
TASKS = "pkg://goldilocks.tasks."  # modules with graders of ours
SCORE = "score"  # the reward, in a function's result that has more
TIMEOUT_S = 60.0
START_S = 300.0  # for a process to import the function
AT_ONCE, PROCESSES = 32, 4  # calls of one function at a time, and in processes, unless ``concurrency`` is set
PR_SET_PDEATHSIG = 1

Function = Callable[..., Any]
Outcome = tuple[Any, "Exception | None"]  # what a function returned, or what it raised


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
        self.name, self._function, self._where, self._calls = name, function, where, calls
        self._timeout_s = calls.timeout or timeout_s
        self._spent = spent if calls.in_use else RewardCosts()
        inner = function.func if isinstance(function, partial) else function
        self._is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()  # a place each, with or without a process
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
                score_of(self.name, result, finite=calls.in_use)
                if isinstance(result, Mapping):
                    self._spent.add(cost=float(result.get("cost") or 0.0))
                self._last = result
                return result
            except Exception as error:
                failed = error
        self._spent.add(failures=1)
        said = f"the reward {self.name} failed {calls.retries + 1} times, the last time with {failed!r}"
        if calls.in_use:
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
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._idle = asyncio.get_running_loop(), asyncio.LifoQueue()
            in_processes = self._where and not self._is_async
            for _ in range(self._calls.concurrency or (PROCESSES if in_processes else AT_ONCE)):
                self._idle.put_nowait(None)
        idle = self._idle
        process = await idle.get()
        try:
            if self._is_async:
                return await self._in_time(self._function(**arguments))
            if message := self._message(arguments):
                process = process or await Process.start(*self._where)
                value, error = await self._in_time(process.ask(message))
            else:
                value, error = await self._in_time(_in_thread(self._function, arguments))
        except BaseException:
            process = process and process.end()  # another is started when the place needs one
            raise
        finally:
            idle.put_nowait(process)
        if error is not None:
            raise error
        return value

    def _message(self, arguments: dict[str, Any]) -> bytes | None:
        """Return the arguments for a process, or None where no process can have them or the function."""
        try:
            if self._where:
                return pickle.dumps(arguments)
            _say_in_thread(self.name, "other processes cannot import it")
        except Exception as error:
            _say_in_thread(self.name, f"its arguments cannot be sent to another process, {error}")
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
            raise RewardTimeout(f"the reward function {self.name} did not return within {self._timeout_s:g} s")
        return task.result()


@cache  # said once
def _say_in_thread(name: str, reason: str) -> None:
    said = "the reward %s runs in a thread: %s. Its time limit does not hold while it keeps the interpreter busy"
    logger.warning(said, name, reason)


def _in_thread(function: Function, arguments: dict[str, Any]) -> asyncio.Future[Outcome]:
    """Call the function in a thread, which cannot be ended and does not keep Python from ending."""
    found: Future[Outcome] = Future()
    found.set_running_or_notify_cancel()
    Thread(target=lambda: found.set_result(_outcome(function, arguments)), name="reward", daemon=True).start()
    return asyncio.wrap_future(found)


class Process:
    """A process that calls one function, one call at a time; it ends with this object."""

    def __init__(self, path: str, name: str) -> None:
        self._connection, theirs = Pipe()
        program = f"import sys; sys.path[:] = {sys.path}; from {__name__} import serve; serve(*sys.argv[1:])"
        command = [sys.executable, "-c", program, str(theirs.fileno()), path, name]
        self._popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self.end = weakref.finalize(self, _end, self._popen)

    @classmethod
    async def start(cls, path: str, name: str) -> Process:
        """Start a process, and wait until it has imported the function."""
        process = cls(path, name)
        _, error = await asyncio.wait_for(process.ask(b""), START_S)
        if error is not None:
            raise error
        return process

    async def ask(self, message: bytes) -> Outcome:
        """Send the arguments of a call and return its outcome."""
        loop, connection, replied = asyncio.get_running_loop(), self._connection, asyncio.Event()
        loop.add_reader(connection.fileno(), replied.set)
        try:
            connection.send_bytes(message)
            await replied.wait()
            found: Outcome = pickle.loads(connection.recv_bytes())
            return found
        except (EOFError, ConnectionError):
            self.end()
            raise RuntimeError(f"the process of a reward function ended with {self._popen.returncode}") from None
        finally:
            loop.remove_reader(connection.fileno())


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()


def serve(descriptor: str, path: str, name: str) -> None:
    """Be such a process: import the function, and call it with what comes until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(int(descriptor))
    try:
        connection.recv_bytes()
        function, error = _outcome(find, {"path": path, "name": name})
        connection.send_bytes(_packed(None, error))
        while True:
            connection.send_bytes(_packed(*_outcome(function, pickle.loads(connection.recv_bytes()))))
    except (EOFError, ConnectionError):
        os._exit(0)  # whatever threads the function has left


@cache
def find(path: str, name: str) -> Function:
    """Return the function ``name`` of a module, ``pkg://package.module``, or of a file."""
    if path.startswith("pkg://"):
        found: Any = importlib.import_module(path.removeprefix("pkg://").replace("/", "."))
    else:
        found = SimpleNamespace(**runpy.run_path(path.removeprefix("file://"), run_name="reward_file"))
    return attrgetter(name)(found)


def _outcome(function: Function, arguments: dict[str, Any]) -> Outcome:
    """Call the function. ``SystemExit`` is an error of the function like any other."""
    try:
        return function(**arguments), None
    except BaseException as error:
        return None, error if isinstance(error, Exception) else RuntimeError(f"the reward function raised {error!r}")


def _packed(value: Any, error: Any) -> bytes:
    """Return an outcome as bytes. Where pickle cannot send the result or the error, an error says so in words."""
    try:
        if error is not None:
            error.__notes__ = ["".join(traceback.format_exception(error))]  # printed where the error is raised
        packed = pickle.dumps((value, error))
        pickle.loads(packed)  # some errors can be written but not read
    except Exception as failed:
        said = f"{type(error).__name__}: {error}" if error else f"the result {value!r} cannot be sent: {failed}"
        packed = pickle.dumps((None, RuntimeError(said)))
    return packed


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
    require(fits, f"the result of the reward {name}", result, f"a finite number, or a mapping with one as {SCORE!r}")
    return number


def is_number(value: object) -> bool:
    """Return whether a value of a function's result is one number; numpy and torch have their own."""
    if isinstance(value, str | bytes):  # numpy's texts have a dtype too
        return False
    return isinstance(value, bool | int | float) or (hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0)


def guard(config: Any, timeout_s: float = TIMEOUT_S, workers: int | None = None) -> None:
    """Have verl's config name ``compute_score`` here, with the user's own functions in its arguments.

    verl loads ``reward.custom_reward_function`` by its path in every process that grades. ``workers`` is how many do so
    at the same time; None: verl's agent loops, or its reward workers.
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


def judge(function: Function, **calls: Any) -> Function:
    """Return a reward function for TRL of one that grades one answer.

    ``function(completion, **row)`` is called with an answer and the columns of its row, and returns a number; it may be
    a coroutine function. ``calls`` are keys of the section: ``judge(ask, concurrency=16, timeout=20, retries=3)``.
    """
    read = reward_calls({"goldilocks": {"rewards": {"timeout": TIMEOUT_S, **calls}}})
    # A partial is a coroutine function to TRL, can have a name, and can be sent to a process that is spawned.
    made = partial(_judged, function, read)
    made.__name__ = _caller_of(function, read).name  # type: ignore[attr-defined]
    return made


async def _judged(
    function: Function, calls: RewardCalls, /, completions: Sequence[Any], **columns: Any
) -> list[float | None]:
    """Return the score of each answer; None where the last try failed, which was logged."""
    reward, several = _caller_of(function, calls), len(completions)
    per_row = {name: one for name, one in columns.items() if isinstance(one, list) and len(one) == several}

    async def grade(row: int) -> float | None:
        arguments = {name: column[row] for name, column in per_row.items()}
        try:
            return score_of(reward.name, await reward(completion=completions[row], **arguments))
        except RewardFailed:
            raise
        except Exception:
            return None

    return list(await asyncio.gather(*map(grade, range(several))))


@cache
def _caller_of(function: Function, calls: RewardCalls) -> RewardCaller:
    path, name = f"pkg://{getattr(function, '__module__', '')}", getattr(function, "__qualname__", "")
    try:  # a function of a script, a closure and an object are only in this process
        found = not path.endswith("main__") and find(path, name) is function  # a spawned process says __mp_main__
    except (ImportError, AttributeError):
        found = False
    shown = getattr(function, "__name__", type(function).__name__)
    return RewardCaller(shown, function, (path, name) if found else (), calls)
