"""Ray workers that are forked from a process which has imported everything, so that none imports for itself.

A run on one machine is nine processes, and each would spend 5 to 10 CPU seconds on the same imports. Instead the driver
imports once and forks a server (``serve_in_background``). Ray starts each worker with this file as its Python
(``runtime_env.py_executable``): a client that hands its arguments, environment and files to the server, which forks the
worker. Client and worker live and die together, so Ray can treat either as the worker. Without a server the client
becomes the ordinary Python. CPU only: a process that has touched CUDA cannot be forked. ``vllm_processes`` has a server
of its own, whose clients are what ``multiprocessing`` spawns.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

SOCKET = "GOLDILOCKS_PREFORK"  # the variable that tells a client where the server listens
HOOK = "RAY_RUNTIME_ENV_HOOK"  # Ray's: a function that is shown the runtime environment of ``ray.init``
# What Ray, verl and this package import: 9 of 10 CPU seconds. Without Ray and verl: both read their environment as they
# are imported, Ray the number of its job among it, without which a worker ends at once.
PRELOADED = (
    "torch._dynamo", "torch.distributed.checkpoint", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama", "transformers.trainer_utils", "tensordict", "datasets", "hydra",
    "fastapi", "aiohttp", "zmq", "uvicorn", "requests", "jsonschema", "google.protobuf.text_format",
    "goldilocks.drive.driver", "goldilocks.engine",
)  # fmt: skip
MODULE, CODE = "-m", "-c"  # before a module's name and before a program, as Python has it
SERVER = "--fork-server="  # before the address of a server for what multiprocessing spawns
SPAWNED = "--multiprocessing-fork"  # the last argument of a process that multiprocessing spawns
GRACE_S = 10.0  # what a spawned process has, once the process that spawned it has ended, to end itself
ANSWER_S = 120.0  # what a forked process has to find out whether it can use the GPU
# With it ``torch.cuda.is_available()`` asks NVML and does not touch CUDA.
NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
SITE_FLAGS = ("-S", "-s")  # of the driver's Python, which Ray puts before a worker's script; the server has them too
NO_BYTE_CODE = "-B"  # of a Python that multiprocessing spawns; a forked process has written all that it will
SETUP = "GOLDILOCKS_RAY_SETUP"  # the variable with Ray's own script that sets a worker up
LANGUAGE, CONTEXT = "--language=", "--serialized-runtime-env-context="  # what Ray tells that script
# Spare workers, which Ray starts before it knows what a run needs, would import for themselves.
NO_SPARE_WORKERS = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
RUN = "GOLDILOCKS_RUN"  # the variable by which a supervisor finds the processes of its run
_LENGTH = struct.Struct("!q")
_NVML = "libnvidia-ml.so.1"
_ASKED_AT_MOST = 1000  # NVML is shut down as often as it was asked; a stub of it never says that it is
_NO_DEVICE = 100  # what CUDA's driver answers where it has no GPU, or is shown none
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG, _PR_SET_NAME = 1, 2, 15


# -- the worker's side: what Ray starts --------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Be Ray's script that sets a worker up, the worker's Python, or the Python of what multiprocessing spawns."""
    if argv[0].startswith(SERVER):
        become_spawned(argv[0][len(SERVER) :], argv[1:])
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
    """Have the server run ``argv``, and end with its status; where it does not, run it here."""
    server = _connected(os.environ.get(SOCKET))
    if server is None:
        _become_python(argv)
    words = list(itertools.dropwhile(SITE_FLAGS.__contains__, argv))
    forward = Signals(signal.SIGINT) if words[0] == MODULE else Signals()
    worker = _ordered(server, words, [0, 1, 2])
    if not worker:
        forward.undo()
        _become_python(argv)
    forward.to(worker)
    _end_as_worker(server)


def become_spawned(address: str, argv: list[str]) -> None:
    """Have the server run what multiprocessing spawns, and end with its status; where it does not, run it here.

    The worker has this process's variables and files. It ends with the process that spawned this one.
    """
    spawned = argv[-1] == SPAWNED and argv[-3] == CODE and set(argv[:-3]) <= {*SITE_FLAGS, NO_BYTE_CODE}
    server = _connected(address) if spawned else None
    if server is None:
        _become_python(argv)
    parent, forward = os.pidfd_open(os.getppid()), Signals(signal.SIGINT, signal.SIGTERM)
    worker = _ordered(server, argv[-3:], _inheritable())
    if not worker:
        forward.undo()
        _become_python(argv)
    forward.to(worker)
    if not _readable([server, parent], None):
        forward.pass_on(signal.SIGTERM)
        if not _readable([server], GRACE_S):
            os._exit(1)  # the server kills the worker of a client that has ended
    _end_as_worker(server)


def _connected(address: str | None) -> socket.socket | None:
    """Return a socket to the server, None where there is none."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address or "")
    except OSError:
        return None
    return server


def _become_python(argv: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, *argv])


def _ordered(server: socket.socket, argv: list[str], files: list[int]) -> int:
    """Order a worker with these files; return its process id, 0 where the server ended or will not fork one."""
    process = {"cwd": os.getcwd(), "limits": _limits(), "ignored": _ignored()}
    try:
        send_order(server, {"argv": argv, "env": dict(os.environ), "files": files, **process}, files)
        worker = server.recv(_LENGTH.size)
    except OSError:
        return 0
    return int(_LENGTH.unpack(worker)[0]) if worker else 0


def send_order(server: socket.socket, order: Mapping[str, Any], files: list[int]) -> None:
    """Send an order and the files that it speaks of."""
    text = json.dumps(order).encode()
    socket.send_fds(server, [_LENGTH.pack(len(text))], files)
    server.sendall(text)


def _inheritable() -> list[int]:
    """Return the files that this process was given; those that it has opened itself are its own."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that listed them
            found += [number] * os.get_inheritable(number)
    return found


def _limits() -> list[tuple[int, tuple[int, int]]]:
    """Return the limits of this process, each with its number."""
    import resource

    numbers = {value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}
    return [(number, resource.getrlimit(number)) for number in numbers]


def _ignored() -> list[int]:
    """Return the signals that this process ignores, as one that ``nohup`` starts does."""
    return [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]


def _readable(files: list[Any], seconds: float | None) -> bool:
    """Wait until one of the files can be read; return whether the first can."""
    import select

    return files[0] in select.select(files, [], [], seconds)[0]


def _end_as_worker(server: socket.socket) -> NoReturn:
    """Wait for the worker's end, and end in the same way."""
    answer = b""
    with contextlib.suppress(OSError):
        answer = server.recv(_LENGTH.size)
    status = _LENGTH.unpack(answer)[0] if answer else 1
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


class Signals:
    """Passes signals on to the worker, now or as soon as it is known. One of Ray's workers ends with its client.

    A signal that this process ignores stays ignored: the worker ignores it too.
    """

    def __init__(self, *numbers: int) -> None:
        self._worker, self._came = 0, list[int]()
        self._passed = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        for number in self._passed:
            signal.signal(number, self.pass_on)

    def to(self, worker: int) -> None:
        self._worker = worker
        for number in self._came:
            self._send(number)

    def pass_on(self, number: int, *_: object) -> None:
        if self._worker:
            self._send(number)
        else:
            self._came.append(number)

    def undo(self) -> None:
        """Have this process meet the signals itself, since there is no worker; those that came too."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._passed)  # else one could come between the lines
        for number in self._passed:
            signal.signal(number, signal.SIG_DFL)
        for number in self._came:
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self._worker, number)


# -- the driver's side -------------------------------------------------------------------------------------------------


def has_pidfd() -> bool:
    """Return whether a process can be waited for by a file: Python may have the call and the kernel refuse it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


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
    if not has_pidfd() or os.environ.get("VERL_PLATFORM") != "cpu" or HOOK in os.environ:
        return None
    if "ray" in sys.modules:  # it is too late: Ray took its settings from this process's environment
        return None
    address = os.path.join(folder or _temporary_folder(), "prefork")
    listener = listening_at(address)
    if listener is None:
        return None
    os.environ |= {**NO_SPARE_WORKERS, **os.environ, SOCKET: address, HOOK: f"{__name__}.runtime_env_hook"}
    return listener


def listening_at(address: str) -> socket.socket | None:
    """Return a socket that listens there; None, with a line, where none can: the path may be taken, or too long."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        print(f"no process of this run is forked: {address}: {error}", file=sys.stderr, flush=True)
        return None
    listener.listen(64)
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

    def accepts(self, env: Mapping[str, str]) -> bool:
        """Whether a process with these variables may be forked."""
        return True

    def prepare(self) -> None:
        """Called in a worker before its work, with the worker's variables."""

    def run(self) -> None:
        """Serve until the driver ends; never returns."""
        while True:
            for key, _ in self._ready.select():
                key.data()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        order, files = _received(client)
        if order is None or len(files) < len(order["files"]) or not self.accepts(order["env"]):
            client.close()
        elif pid := self.started(order, files):
            with contextlib.suppress(OSError):  # the client may have ended by now
                client.send(_LENGTH.pack(pid))
            self._watch(pid, client)
        else:
            client.close()
        for file in files:
            os.close(file)

    def started(self, order: dict[str, Any], files: list[int]) -> int:
        """Fork a worker; return its process id, 0 where that is not possible: the client runs Python itself."""
        try:
            pid = os.fork()
        except OSError:  # there is no memory for it, or no number
            return 0
        if pid == 0:
            try:
                os.setsid()  # a group of its own: Ray ends the process group of a worker that died
                end_with_parent()
                _work(order, files, self.prepare)
            finally:  # the worker must not return into the server's code
                os._exit(1)
        return pid

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


def work_for(link: socket.socket, prepare: Callable[[], None], sound: Callable[[Mapping[str, str]], bool]) -> None:
    """Wait for one order and become its worker; one with variables that are not ``sound`` here, in a new Python."""
    order, files = _received(link)
    if order is None or len(files) < len(order["files"]):
        return
    if not sound(order["env"]):
        _take_on(order, files)
        _become_python(order["argv"])
    _work(order, files, prepare)


def _received(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return a client's order and its files; no order where the client was killed before it had sent it all."""
    head, files, *_ = socket.recv_fds(client, _LENGTH.size, 253)  # as many as the kernel passes at once
    size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
    with client.makefile("rb") as stream:
        text = stream.read(size)
    return (json.loads(text) if text and len(text) == size else None), files


def _work(order: dict[str, Any], files: list[int], prepare: Callable[[], None]) -> None:
    """Become the process that the client would have been."""
    import atexit
    import runpy
    import traceback
    import types

    _take_on(order, files)
    module, code = (order["argv"][0] == option for option in (MODULE, CODE))
    sys.argv[:] = order["argv"][module:]
    if code:
        program = sys.argv.pop(1)
    elif not module:
        sys.path[0] = os.path.dirname(sys.argv[0])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # this worker's: a fork has the path of its parent
    sys.path[1:1] = [folder for folder in given if folder and folder not in sys.path]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all workers draw the same numbers
    status = 0
    try:
        prepare()
        if code:
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(program, vars(sys.modules["__main__"]))
        elif module:
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


def _take_on(order: dict[str, Any], files: list[int]) -> None:
    """Take on what the kernel knows of the client: limits, files, variables, folder, name and signals."""
    import ctypes

    _limit(order["limits"])
    _number(files, order["files"])
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    if RUN in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, process_name(os.environ[RUN]).encode())  # children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in order["ignored"]:
        signal.signal(number, signal.SIG_IGN)


def _limit(limits: list[tuple[int, tuple[int, int]]]) -> None:
    """Set the client's limits: its files may have higher numbers than the server's limit allows."""
    import resource

    for number, limit in limits:
        with contextlib.suppress(ValueError, OSError):  # one that only a privileged process could raise
            resource.setrlimit(number, limit)


def _number(files: list[int], numbers: list[int]) -> None:
    """Give the files these numbers, and close all others."""
    moved = [_moved(file, numbers) for file in files]
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
    _close_all_but(numbers)


def _moved(file: int, numbers: Collection[int]) -> int:
    """Return the file under none of these numbers, since another file is wanted there."""
    while file in numbers:
        file = os.dup(file)
    return file


def _close_all_but(kept: Collection[int]) -> None:
    """Close all files but these; the numbers up to the limit may be a billion, where it is unlimited."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in kept:
            os.closerange(number, number + 1)  # without an error for the one that listed them


def spoiled() -> bool:
    """Return whether a process that is forked from this one could not use the GPU; only such a process can tell."""
    asked = _let_go_of_nvml()
    child = os.fork()
    if child == 0:
        try:
            _close_all_but((0, 1, 2))  # as a worker does
            os._exit(int(_gpu_is_lost(asked)))
        finally:
            os._exit(1)
    ended = os.pidfd_open(child)
    if not _readable([ended], ANSWER_S):
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def _let_go_of_nvml() -> bool:
    """Have NVML, which imports may have asked, close its files: no worker has them. Return whether it was asked."""
    import ctypes

    asked = False
    with contextlib.suppress(OSError):  # without a driver
        library = ctypes.CDLL(_NVML)
        for _ in range(_ASKED_AT_MOST):
            if library.nvmlShutdown() != 0:
                break
            asked = True
    return asked


def _gpu_is_lost(asked: bool) -> bool:
    """Ask NVML if it was asked before, CUDA's driver, since other packages than torch may have used it, and torch."""
    import ctypes

    answers = [ctypes.CDLL(_NVML).nvmlInit_v2()] if asked else []
    with contextlib.suppress(OSError):  # without a driver there is nothing to lose
        answers.append(ctypes.CDLL("libcuda.so.1").cuInit(0))
    torch = sys.modules.get("torch")
    return not {0, _NO_DEVICE}.issuperset(answers) or (torch is not None and torch.cuda._is_in_bad_fork())


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
