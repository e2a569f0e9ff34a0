"""Forks the processes of vLLM from one that imports vLLM while the run starts.

vLLM's engine and its workers are processes that ``multiprocessing`` spawns one after another, and each would import
torch and vLLM anew. Instead ``start`` begins, with the run, a server that imports them. The processes of the run find
in a variable what to spawn with (``multiprocessing.set_executable``): the client of ``prefork``, which has the server
fork a process with the client's arguments, variables and files. vLLM still spawns, and where there is no server it
spawns what it always has.

A process is not forked whose imports would have read other variables than the server's did. For a GPU the server forks
nothing, since a process that has touched CUDA cannot be: it has spare processes, as many as vLLM will spawn, which
import for themselves while the run starts, and gives each client one of these.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import multiprocessing
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from goldilocks.errors import require
from goldilocks.launch import prefork
from goldilocks.launch.prefork import (
    NVML,
    SERVER,
    Server,
    end_with_parent,
    has_pidfd,
    listening_at,
    py_executable,
)
from goldilocks.platforms import SPAWN_WITH

FORK = "GOLDILOCKS_FORK_VLLM"  # the variable by which a user chooses: 1 or 0
# What these processes import, the safest first. vllm_cpu finds the build for the CPU, verl extends the workers.
PRELOADED = (
    "goldilocks.platforms.vllm_cpu", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.model_loader", "vllm.v1.worker.gpu_worker", "vllm.model_executor.models.qwen2", "verl",
    "verl.workers.rollout.vllm_rollout.utils",
)  # fmt: skip
ON_GPU = ("vllm.v1.attention.backends.flash_attn", "vllm.compilation.backends")
AS_VERL = {"VLLM_LOGGING_LEVEL": "WARN"}  # where nobody has chosen a level
AS_VLLM = {"cpu": {"TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}}  # what vLLM sets on a platform before it spawns
# What is read as the modules are imported, by how the names begin; what vLLM reads later is not here.
READ_BY_IMPORTS = (
    "GOLDILOCKS_PATCHES", "GOMP_", "HF_", "KMP_", "MKL_", "OMP_", "PYTORCH_", "TORCH", "TRANSFORMERS_", "TRITON_",
    "VERL_PLATFORM", "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_", "VLLM_TARGET_DEVICE",
)  # fmt: skip
# By it vLLM sets a path of libraries for the processes that it spawns; one that is forked has those of the server.
OTHER_LIBRARIES = "VLLM_ENABLE_CUDA_COMPATIBILITY"
BOUND, UNBOUND = "VLLM_CPU_OMP_THREADS_BIND", "nobind"  # bound threads need a library that vLLM preloads as it spawns
GPUS = "CUDA_VISIBLE_DEVICES"
SPARE = -1  # in the place of the number of spares: the process is one
_NOT_INITIALIZED = 3  # what CUDA's driver answers in a process that has not used it
THREADS = "OMP_NUM_THREADS"  # Ray and vLLM set it by process; torch can be told later


def start(
    folder: Path, variables: Mapping[str, str] | None = None, modules: Sequence[str] = (), spares: int = 0
) -> None:
    """Start the server, and tell the processes that this one starts from now on, which have these variables too.

    The server ends with this process, as those that it forks do, and its ``spares``, if it is to have any.
    """
    platform = os.environ.get("VERL_PLATFORM", "")
    modules = modules or (*PRELOADED, *(() if platform == "cpu" else ON_GPU))
    given = {name: str(value) for name, value in (variables or {}).items()}
    client = folder / "vllm-python"
    address = str(client.with_suffix(".socket"))
    listener = listening_at(address)
    if listener is None:
        return
    with listener:
        client.write_text(f'#!/bin/sh\nexec {py_executable()} {SERVER}{shlex.quote(address)} "$@"\n')
        client.chmod(0o700)
        subprocess.Popen(
            _command(listener.fileno(), os.getpid(), client, spares, modules),
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            env={**AS_VERL, **AS_VLLM.get(platform, {}), **os.environ, **given, **NVML},
            start_new_session=True,  # Ctrl-C in a terminal is the driver's
        )
    os.environ[SPAWN_WITH] = str(client)


def wanted(config: DictConfig) -> bool:
    """Return whether the run has an engine of vLLM on this machine whose processes can be forked."""
    rollout = config.actor_rollout_ref.rollout
    executor = OmegaConf.select(rollout, "engine_kwargs.vllm.distributed_executor_backend")
    return (
        has_pidfd()
        and _chosen(config.trainer.device == "cpu")
        and OTHER_LIBRARIES not in os.environ
        and os.environ.get(BOUND, UNBOUND) == UNBOUND
        and rollout.name == "vllm"
        and not rollout.get("full_determinism")  # a process has its seed of hashes, which verl sets, from its beginning
        and config.trainer.nnodes == 1
        and executor in (None, "mp", "uni")  # Ray reads its variables as it is imported
        and importlib.util.find_spec("vllm") is not None
    )


def spares_for(config: DictConfig) -> int:
    """Return how many processes vLLM spawns in this run on GPUs: a worker for each, and one for each engine."""
    rollout, gpus = config.actor_rollout_ref.rollout, config.trainer.n_gpus_per_node
    engines = gpus // (rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size)
    return 0 if config.trainer.device == "cpu" else int(gpus + engines)


def _chosen(otherwise: bool) -> bool:
    """What the user chose by the variable, if anything."""
    value = os.environ.get(FORK) or str(int(otherwise))
    require(value in ("0", "1"), FORK, value, "0 or 1")
    return value == "1"


def _command(connection: int, parent: int, client: Path, spares: int, modules: Sequence[str]) -> list[str]:
    name = "goldilocks.launch.vllm_processes"
    return [sys.executable, "-m", name, *map(str, (connection, parent, client, spares)), *modules]


def main(listener: int, driver: int, client: Path, spares: int, *modules: str) -> None:
    """Import the modules, and fork for each client until the driver ends; or have spares, or be one."""
    end_with_parent()
    if os.getppid() != driver:  # it ended before the kernel was asked
        return
    connection = socket.socket(fileno=listener)
    if spares == SPARE:
        spare(connection, client, modules)
    elif spares:
        SpareServer(connection, client, spares, modules).run()
    else:
        good = _importable(modules)
        if good != modules:  # what has failed half way is in no process that begins anew with the others
            os.execv(sys.executable, _command(listener, driver, client, spares, good))
        prefork.preload(())  # what there is now is shared
        multiprocessing.set_executable(str(client))  # in what is forked from this process
        VllmServer(connection).run()


def _importable(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Import the modules up to the first one that fails; return those."""
    for place, module in enumerate(modules):
        try:
            importlib.import_module(module)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            print(f"vLLM's processes import {module} for themselves: {reason}", file=sys.stderr, flush=True)
            return modules[:place]
    return modules


class VllmServer(Server):
    """Forks a process only if its imports would have read the variables that this process's have."""

    def accepts(self, env: Mapping[str, str]) -> bool:
        return would_import_the_same(env)

    def prepare(self) -> None:
        prepare()


def would_import_the_same(env: Mapping[str, str]) -> bool:
    """Whether all variables that are read by imports have the values that they have here."""
    names = {name for name in (*env, *os.environ) if name.startswith(READ_BY_IMPORTS)} - {THREADS}
    other = sorted(name for name in names if env.get(name) != os.environ.get(name))
    if other:
        print(f"a process of vLLM imports for itself: {', '.join(other)} differ", file=sys.stderr, flush=True)
    return not other


def prepare() -> None:
    """Have torch use as many threads as if it had been imported with the process's variables."""
    threads, torch = os.environ.get(THREADS, ""), sys.modules.get("torch")
    if threads.isdigit() and torch is not None:
        torch.set_num_threads(int(threads))


# -- processes that use a GPU ------------------------------------------------------------------------------------------


class SpareServer(Server):
    """Gives each client a process that has imported meanwhile."""

    def __init__(self, listener: socket.socket, client: Path, number: int, modules: Sequence[str]) -> None:
        super().__init__(listener)
        self._spares = [_spare(client, modules) for _ in range(number)]
        self._left = list(self._spares)

    def started(self, order: dict[str, Any], files: list[int]) -> int:
        """Give the order to a spare process; return its process id, 0 where none is left."""
        while self._left:
            process, link = self._left.pop(0)
            with link, contextlib.suppress(OSError):  # it has ended
                prefork.send_order(link, order, files)
                return process.pid
        return 0


def _spare(client: Path, modules: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a spare process; return it with the socket by which it takes its order."""
    ours, its = socket.socketpair()
    with its:
        command = _command(its.fileno(), os.getpid(), client, SPARE, modules)
        return subprocess.Popen(command, pass_fds=[its.fileno()], start_new_session=True), ours


def spare(link: socket.socket, client: Path, modules: Sequence[str]) -> None:
    """Import the modules, and become what the first order says."""
    for module in modules:
        with contextlib.suppress(Exception):  # where it is needed, it says so
            importlib.import_module(module)
    multiprocessing.set_executable(str(client))
    prefork.work_for(link, prepare, lambda env: would_import_the_same(env) and sees_the_same_gpus(env))


def sees_the_same_gpus(env: Mapping[str, str]) -> bool:
    """Whether this process may have these variables: when CUDA is first used, it reads which GPUs there are for it."""
    try:
        untouched = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _NOT_INITIALIZED
    except (OSError, AttributeError):  # no driver
        untouched = True
    return untouched or env.get(GPUS) == os.environ.get(GPUS)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
