"""Forks the runs of a study on TRL from one process that has imported everything: a run starts in a second.

Without it, each of these short runs would spend 10 CPU seconds on imports. The server is a fresh process, since one
that has touched CUDA cannot be forked; where its own imports touch CUDA, there is no server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from goldilocks.launch.prefork import NVML, SOCKET, Server, has_pidfd, preload, spoiled

PRELOADED = (
    "goldilocks.launch.on_trl", "goldilocks.launch.preflight", "goldilocks.verl.estimators", "goldilocks.verl.checks",
    "goldilocks.verl.dispatch.failures", "goldilocks.trl", "goldilocks.tasks.registry", "datasets",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2",
)  # fmt: skip


class ForkServer:
    """``with ForkServer() as server: Popen(…, env={**env, **server.variables(env)})``; it starts when it is needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="gl", dir="/tmp"))  # a socket's path has 107 characters at most
        self._starting = threading.Lock()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()  # its runs have ended, or end with it
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that make a run with ``env`` a fork of the server; none where there is no server."""
        with self._starting:
            if self._process is None and has_pidfd():
                self._process = self._started(env)
        serving = self._process is not None and self._process.poll() is None
        return {SOCKET: str(self._address)} if serving else {}

    @property
    def reason(self) -> str:
        """Return why there is no server: the last line that it printed."""
        log = self._folder / "log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return lines[-1] if lines else "it was not started"

    @property
    def _address(self) -> Path:
        return self._folder / "runs"

    def _started(self, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the server and wait until it listens, or has ended."""
        with (self._folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self._address)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **env, **NVML},
                start_new_session=True,  # Ctrl-C in the terminal is for the command alone
            )
        assert process.stdout is not None
        if not process.stdout.read(1):
            process.wait()
        return process


def main(address: str) -> int:
    """Import, listen at ``address``, say so by one byte, and fork until the standard input is closed."""
    said = os.dup(1)
    os.dup2(2, 1)  # imports may print; the standard output carries one byte
    preload(PRELOADED)
    if spoiled():
        print("each run imports for itself: a forked one could not use the GPU", file=sys.stderr)
        return 1
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    server = Server(listener)
    server.end_with(0)
    os.write(said, b"1")
    os.close(said)
    server.run()
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1]))
