"""A server, its engine and a worker of that, as vLLM starts them: none outlives the one that started it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PATIENCE_S = 120  # for what is sure to happen: a busy machine is not a mistake
FAMILY = """
import multiprocessing, os, signal, sys, threading, time
from goldilocks.verl.patches import vllm

vllm.LOOK_S = vllm.GRACE_S = 0.1
METHOD, DEAF = sys.argv[1], sys.argv[2:]
CHILD = {"server": "engine", "engine": "worker"}


def live(name):
    if METHOD == "spawn" or name == "server":
        vllm.end_orphans()  # vLLM loads the plug-in in each process that it does not fork
    if name in DEAF:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if name in CHILD:  # by a thread that ends
        process = multiprocessing.get_context(METHOD).Process(target=live, args=(CHILD[name],))
        starting = threading.Thread(target=process.start)
        starting.start()
        starting.join()
    os.write(1, f"{name} {os.getpid()}\\n".encode())
    time.sleep(10_000)


if __name__ == "__main__":
    live("server")
"""


def started(folder: Path, *words: str) -> tuple[subprocess.Popen[str], dict[str, psutil.Process]]:
    """Start the family; return the server, and all of them by name."""
    script = folder / "family.py"
    script.write_text(FAMILY)
    server = subprocess.Popen([sys.executable, str(script), *words], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pids = dict(server.stdout.readline().split() for _ in range(3))
    return server, {name: psutil.Process(int(pid)) for name, pid in pids.items()}


def ended(process: psutil.Process) -> bool:
    """Wait for it. Where nobody reaps a process whose parent is gone, it stays a zombie."""
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_engine_and_its_worker_end_with_the_server(method: str, tmp_path: Path) -> None:
    server, family = started(tmp_path, method)
    assert [process.is_running() for process in family.values()] == [True] * 3
    server.send_signal(signal.SIGKILL)
    server.wait()
    assert ended(family["engine"])
    assert ended(family["worker"])


def test_a_worker_that_does_not_heed_signals_ends_with_its_engine_and_the_server_stays(tmp_path: Path) -> None:
    server, family = started(tmp_path, "spawn", "worker")
    family["engine"].kill()
    assert ended(family["worker"])
    assert server.poll() is None
    server.kill()
    server.wait()
