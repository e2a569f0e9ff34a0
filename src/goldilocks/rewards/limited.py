"""A time limit that holds whatever a reward function does: plain functions run in processes, which can be killed.

This file is also the program of such a process, so it imports the standard library alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import os
import pickle
import runpy
import signal
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from multiprocessing.connection import Connection, Pipe
from operator import attrgetter
from threading import Thread
from types import SimpleNamespace
from typing import Any

PATIENCE_S = 0.5  # while calls wait, another process is started after this time, and again
START_S = 300.0  # for a process to import the function
PR_SET_PDEATHSIG = 1

Function = Callable[..., Any]
Outcome = tuple[Any, "Exception | None"]  # what a function returned, or what it raised


@cache
def find(path: str, name: str) -> Function:
    """Return the function ``name`` of a module, ``pkg://package.module``, or of a file."""
    if path.startswith("pkg://"):
        found: Any = importlib.import_module(path.removeprefix("pkg://").replace("/", "."))
    else:
        found = SimpleNamespace(**runpy.run_path(path.removeprefix("file://"), run_name="reward_file"))
    try:
        return attrgetter(name)(found)
    except AttributeError:
        raise AttributeError(f"there is no reward function {name!r} in {path}") from None


def outcome(function: Function, arguments: dict[str, Any]) -> Outcome:
    """Call the function. ``SystemExit`` is an error of the function like any other."""
    try:
        return function(**arguments), None
    except BaseException as error:
        return None, error if isinstance(error, Exception) else RuntimeError(f"the reward function raised {error!r}")


def in_thread(function: Function, arguments: dict[str, Any]) -> asyncio.Future[Outcome]:
    """Call the function in a thread, which cannot be ended and does not keep Python from ending."""
    found: Future[Outcome] = Future()
    found.set_running_or_notify_cancel()
    Thread(target=lambda: found.set_result(outcome(function, arguments)), name="reward", daemon=True).start()
    return asyncio.wrap_future(found)


class Process:
    """A process that calls one function, one call at a time; it ends with this object."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())]
        self._popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self.end = weakref.finalize(self, _end, self._popen)

    async def ask(self, message: bytes) -> Outcome:
        """Send a message and return the reply."""
        loop, connection = asyncio.get_running_loop(), self._connection
        replied = asyncio.Event()
        loop.add_reader(connection.fileno(), replied.set)
        try:
            connection.send_bytes(message)
            await replied.wait()
            return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.end()
            raise RuntimeError(f"the process of a reward function ended with {self._popen.returncode}") from None
        finally:
            loop.remove_reader(connection.fileno())


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()


class Places:
    """Places for the calls of one function on one event loop, each with a process once it has needed one."""

    def __init__(self, first: int, most: int) -> None:
        """``first`` are there at once; while calls wait, another opens every ``PATIENCE_S``."""
        self.idle: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()
        self._count, self._most = first, most
        self._waiting, self._is_watched, self._is_starting = 0, False, False
        for _ in range(first):
            self.idle.put_nowait(None)

    async def take(self) -> Process | None:
        """Wait for a place, and return its process."""
        if self.idle.empty() and not self._is_watched:
            self._watch()
        self._waiting += 1
        try:
            return await self.idle.get()
        finally:
            self._waiting -= 1

    def _watch(self) -> None:
        self._is_watched = self._count < self._most
        if self._is_watched:
            asyncio.get_running_loop().call_later(PATIENCE_S, self._open_another)

    def _open_another(self) -> None:
        self._is_watched = False
        if self._waiting:
            if not self._is_starting:
                self._count += 1
                self.idle.put_nowait(None)
            self._watch()

    async def start(self, path: str, name: str) -> Process:
        """Start a process, and wait until it has imported the function."""
        process, self._is_starting = Process(), True
        try:
            _, error = await asyncio.wait_for(process.ask(pickle.dumps((path, name, sys.path))), START_S)
        finally:
            self._is_starting = False
        if error is not None:
            raise error
        return process


def _serve(connection: Connection, parent: int) -> None:
    """Import the function that the parent names, and call it with what comes until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    path, name, sys.path[:] = pickle.loads(connection.recv_bytes())
    function, error = outcome(find, {"path": path, "name": name})
    connection.send_bytes(_packed(None, error))
    while os.getppid() == parent:
        connection.send_bytes(_packed(*outcome(function, pickle.loads(connection.recv_bytes()))))


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


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
    os._exit(0)  # whatever threads the function has left
