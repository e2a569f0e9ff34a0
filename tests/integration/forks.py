"""Launches without the imports, which are most of what they would cost.

``python forks.py SCRIPT_OR_MODULE …`` runs a program whose Ray workers are forked. ``Drivers`` is a process that has
imported what such a program imports; the programs themselves are forked from that process.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from goldilocks.launch.prefork import SOCKET, py_executable, serve_in_background

# What a launch leaves behind becomes a child of this process (PR_SET_CHILD_SUBREAPER), so nothing is out of sight.
SERVER = """
import ctypes, socket, sys
from goldilocks.launch.prefork import PRELOADED, Server, preload
ctypes.CDLL(None).prctl(36, 1)
preload(PRELOADED)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
server = Server(listener)
server.end_with(0)
print("listens", flush=True)
server.run()
"""


def forking(program: str) -> list[str]:
    """Return the words that start a script or a module with workers that are forked."""
    return [str(Path(__file__)), program]


class Drivers:
    """``command, variables = drivers.starts(words)``; what is forked from the process ends with it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gl", dir="/tmp"))  # a socket's path has 107 characters at most
        self._process: subprocess.Popen[str] | None = None
        if hasattr(os, "pidfd_open"):
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(self._folder / "drivers")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=dict(env),
                start_new_session=True,
            )
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "listens\n"

    def starts(self, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command for these words and variables for it: a fork for ``forking``, else an ordinary Python."""
        if self._process is None or words[0] != str(Path(__file__)):
            return [sys.executable, *words], {}
        return [*shlex.split(py_executable()), *words], {SOCKET: str(self._folder / "drivers")}

    def forked(self) -> list[psutil.Process]:
        """Return what was forked and is alive, and what that has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True) if self._process else []
        return []

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


if __name__ == "__main__":
    serve_in_background()
    del sys.argv[0]
    if sys.argv[0].endswith(".py"):
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
