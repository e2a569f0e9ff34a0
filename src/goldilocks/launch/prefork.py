"""Ray workers that are forked from a process which has imported everything, so that none imports for itself.

A run on one machine is nine processes, and each would spend 5 to 10 CPU seconds on the same imports. Instead the driver
imports once and forks a server (``serve_in_background``). Ray starts each worker with this file as its Python
(``runtime_env.py_executable``): a client that hands its arguments, environment and files to the server, which forks the
worker. Client and worker live and die together, so Ray can treat either as the worker. Without a server the client
becomes the ordinary Python. CPU only: a process that has touched CUDA cannot be forked.

The client is why nothing but light modules of the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

SOCKET = "GOLDILOCKS_PREFORK"  # the variable that tells a client where the server listens
HOOK = "RAY_RUNTIME_ENV_HOOK"  # Ray's: a function that is shown the runtime environment of ``ray.init``
# What Ray, verl and this package import: 9 of 10 CPU seconds. Without Ray and verl: both read their environment as they
# are imported, and Ray seeds the generator of its ids then, so that forked workers would draw the same ids.
PRELOADED = (
    "torch._dynamo", "torch.distributed.checkpoint", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama", "transformers.trainer_utils", "tensordict", "datasets", "hydra",
    "fastapi", "aiohttp", "zmq", "uvicorn", "requests", "jsonschema", "google.protobuf.text_format",
    "goldilocks.drive.driver", "goldilocks.engine",
)  # fmt: skip
MODULE = "-m"  # before a module's name, as Python has it
SITE_FLAGS = ("-S", "-s")  # of the driver's Python, which Ray puts before a worker's script; the server has them too
SETUP = "GOLDILOCKS_RAY_SETUP"  # the variable with Ray's own script that sets a worker up
LANGUAGE, CONTEXT = "--language=", "--serialized-runtime-env-context="  # what Ray tells that script
# Spare workers, which Ray starts before it knows what a run needs, would import for themselves.
NO_SPARE_WORKERS = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
RUN = "GOLDILOCKS_RUN"  # the variable by which a supervisor finds the processes of its run
_LENGTH = struct.Struct("!q")
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG, _PR_SET_NAME = 1, 2, 15


# -- the worker's side: what Ray starts --------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Be Ray's script that sets a worker up, or the worker's Python."""
    if any(word.startswith(LANGUAGE) for word in argv):
        set_up_worker(argv)
    become_worker(argv)


def set_up_worker(argv: list[str]) -> None:
    """Set the worker's variables and become the worker; Ray's own script sets up one that needs more."""
    context = json.loads(next((word[len(CONTEXT) :] for word in argv if word.startswith(CONTEXT)), "{}"))
    needs = {key for key, value in context.items() if value}
    if context.get("py_executable") != py_executable() or needs - {"py_executable", "env_vars"}:
        os.execv(sys.executable, [sys.executable, os.environ[SETUP], *argv])
    for key, value in context.get("env_vars", {}).items():
        os.environ[key] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))  # as Ray does
    become_worker([word for word in argv if not word.startswith((LANGUAGE, CONTEXT))])


def become_worker(argv: list[str]) -> None:
    """Have the server run ``argv``, and end with its status; without a server, run it here."""
    try:
        server = socket.socket(socket.AF_UNIX)
        server.connect(os.environ[SOCKET])
    except (KeyError, OSError):
        os.execv(sys.executable, [sys.executable, *argv])
    argv = list(itertools.dropwhile(SITE_FLAGS.__contains__, argv))
    forward = Interrupts() if argv[0] == MODULE else None
    order = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    socket.send_fds(server, [_LENGTH.pack(len(order))], [0, 1, 2])
    server.sendall(order)
    worker = server.recv(_LENGTH.size)
    if worker and forward is not None:
        forward.to(_LENGTH.unpack(worker)[0])
    answer = server.recv(_LENGTH.size)
    status = _LENGTH.unpack(answer)[0] if answer else 1
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


class Interrupts:
    """Passes SIGINT on to the worker, now or as soon as it is known. A worker of Ray's ends with its client instead."""

    def __init__(self) -> None:
        self._worker, self._came = 0, False
        signal.signal(signal.SIGINT, self._interrupted)

    def to(self, worker: int) -> None:
        self._worker = worker
        if self._came:
            os.kill(worker, signal.SIGINT)

    def _interrupted(self, *_: object) -> None:
        self._came = True
        if self._worker:
            os.kill(self._worker, signal.SIGINT)


# -- the driver's side -------------------------------------------------------------------------------------------------


def py_executable() -> str:
    """Return this file as the Python of Ray's workers; isolated and without site-packages, it starts in 20 ms."""
    import shlex

    return shlex.join([sys.executable, "-I", "-S", os.path.abspath(__file__)])


def runtime_env_hook(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Have workers forked, unless the user chose a Python for them (``RAY_RUNTIME_ENV_HOOK``)."""
    given = runtime_env or {}
    if given.get("py_executable"):  # verl says None
        return given
    _replace_setup_script()
    return {**given, "py_executable": py_executable()}


def _replace_setup_script() -> None:
    """Have Ray start each worker with this file: its own script imports Ray, half a second, to set a few variables."""
    from ray._private import node, ray_constants

    rays, ours = ray_constants.SETUP_WORKER_FILENAME, os.path.abspath(__file__)
    if rays != ours:
        os.environ[SETUP] = os.path.join(os.path.dirname(node.__file__), "workers", rays)
        ray_constants.SETUP_WORKER_FILENAME = ours


def serve_in_background(folder: str | None = None) -> bool:
    """Import what workers need, fork the server, and tell Ray of it; False where that is not possible."""
    listener = listen(folder)
    if listener is not None:
        serve(listener)
    return listener is not None


def listen(folder: str | None = None) -> socket.socket | None:
    """Tell Ray of the server that ``serve`` will start; None where workers cannot be forked.

    The server listens in ``folder``, or in one of its own, and ends with this process, as its workers do.
    """
    if not hasattr(os, "pidfd_open") or os.environ.get("VERL_PLATFORM") != "cpu" or HOOK in os.environ:
        return None
    if "ray" in sys.modules:  # it is too late: Ray took its settings from this process's environment
        return None
    address = os.path.join(folder or _temporary_folder(), "prefork")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    os.environ |= {**NO_SPARE_WORKERS, **os.environ, SOCKET: address, HOOK: f"{__name__}.runtime_env_hook"}
    return listener


def serve(listener: socket.socket) -> None:
    """Import what workers need and fork the server; Ray must not have been imported."""
    preload(PRELOADED)
    if os.fork() == 0:
        os.setsid()  # Ctrl-C in a terminal is the driver's
        end_with_parent()
        try:
            Server(listener).run()
        finally:  # the server must not return into the driver's code
            os._exit(1)
    listener.close()


def _temporary_folder() -> str:
    """Make a folder with a short path, since a socket's has 107 characters at most."""
    import atexit
    import shutil
    import tempfile

    folder, owner = tempfile.mkdtemp(prefix="gl", dir="/tmp"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked process runs this too
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def preload(modules: Sequence[str]) -> None:
    """Import the modules once for all processes that will be forked from this one."""
    import gc
    import importlib

    gc.disable()  # hardly anything that is imported is garbage, and looking for it is a quarter of the time
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        gc.enable()
    gc.freeze()  # no later collection writes to the pages that the workers share


class Server:
    """Forks a worker for each client, and ends each when the other has ended."""

    def __init__(self, listener: socket.socket) -> None:
        import selectors

        self._listener = listener
        self._alive: set[int] = set()
        self._ready = selectors.DefaultSelector()
        self._ready.register(listener, selectors.EVENT_READ, self._accept)

    def end_with(self, stream: int) -> None:
        """End, and the workers too, when nobody can write to this file any more."""
        import selectors

        self._ready.register(stream, selectors.EVENT_READ, lambda: os._exit(0))

    def run(self) -> None:
        """Serve until the driver ends; never returns."""
        while True:
            for key, _ in self._ready.select():
                key.data()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        order, files = _received(client)
        if order is None:
            client.close()
        else:
            self._fork(order, files, client)
        for file in files:
            os.close(file)

    def _fork(self, order: dict[str, Any], files: list[int], client: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()  # a group of its own: Ray ends the process group of a worker that died
                end_with_parent()
                _work(order, files)
            finally:  # the worker must not return into the server's code
                os._exit(1)
        with contextlib.suppress(OSError):  # the client may have ended by now
            client.send(_LENGTH.pack(pid))
        self._watch(pid, client)

    def _watch(self, pid: int, client: socket.socket) -> None:
        import selectors

        ended = os.pidfd_open(pid)
        self._alive.add(pid)

        def worker_ended() -> None:
            _, status = os.waitpid(pid, 0)
            self._alive.discard(pid)
            self._ready.unregister(ended)
            self._ready.unregister(client)
            os.close(ended)
            with client, contextlib.suppress(OSError):  # the client may have ended too
                client.send(_LENGTH.pack(os.waitstatus_to_exitcode(status)))

        def client_ended() -> None:
            if pid in self._alive:  # else it ended in the same moment, and its number may be reused
                os.kill(pid, signal.SIGKILL)

        self._ready.register(ended, selectors.EVENT_READ, worker_ended)
        self._ready.register(client, selectors.EVENT_READ, client_ended)


def _received(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return a client's order and its files; no order where the client was killed before it had sent it all."""
    head, files, *_ = socket.recv_fds(client, _LENGTH.size, 3)
    size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
    with client.makefile("rb") as stream:
        text = stream.read(size)
    return (json.loads(text) if text and len(text) == size else None), files


def _work(order: dict[str, Any], files: list[int]) -> None:
    """Become the process that the client would have been."""
    import atexit
    import ctypes
    import runpy
    import traceback

    for number, file in enumerate(files):
        os.dup2(file, number)
    _close_all_but(len(files))
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    if RUN in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, process_name(os.environ[RUN]).encode())  # children inherit it
    module = order["argv"][0] == MODULE
    sys.argv[:] = order["argv"][module:]
    if not module:
        sys.path[0] = os.path.dirname(sys.argv[0])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # this worker's: a fork has the path of its parent
    sys.path[1:1] = [folder for folder in given if folder and folder not in sys.path]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.modules["numpy"].random.seed()  # else all workers draw the same numbers
    status = 0
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _close_all_but(kept: int) -> None:
    """Close all files but the first ones; the numbers up to the limit may be a billion, where it is unlimited."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number >= kept:
            os.closerange(number, number + 1)  # without an error for the one that listed them


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this signal when the parent ends, unless it was asked for one already."""
    import ctypes

    library, asked = ctypes.CDLL(None), ctypes.c_int()
    library.prctl(_PR_GET_PDEATHSIG, ctypes.byref(asked))
    if not asked.value:
        library.prctl(_PR_SET_PDEATHSIG, number)


def process_name(run: str) -> str:
    """Return the name of a forked run's processes: the kernel shows them with the server's variables, without RUN."""
    import hashlib

    return f"gl{hashlib.sha256(run.encode()).hexdigest()[:12]}"


if __name__ == "__main__":
    main(sys.argv[1:])
