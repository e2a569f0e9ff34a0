"""Starts the driver of a run, watches it, and ends everything it started.

Invariant: after ``end`` no process of the run is alive. Ray's daemons leave the driver's process group and session, so
the processes of a run are found by a variable that they inherit, and those of a forked run by their name.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from goldilocks.launch import prefork
from goldilocks.runs.files import RunDir

GRACE_S = 10.0  # for the driver to stop Ray by itself


class Supervisor:
    """``with Supervisor(run, env) as driver: while driver.running: …``"""

    def __init__(self, run: RunDir, env: Mapping[str, str]) -> None:
        self.run = run
        self._env = {**os.environ, **env, prefork.RUN: str(run.path)}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Supervisor:
        # A session of its own: Ctrl-C in the terminal reaches only the supervisor, which then ends the run.
        with self.run.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._python, "-m", "goldilocks.launch.driver", str(self.run.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def _python(self) -> list[str]:
        """Return the command for Python: one that forks from a server if the environment names a server."""
        return shlex.split(prefork.py_executable()) if prefork.SOCKET in self._env else [sys.executable]

    @property
    def status(self) -> int | None:
        """Return the driver's exit status, None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        return self._process is not None and self.status is None

    def end(self) -> None:
        """Ask the driver to stop, wait for it, and end every process that is left."""
        if self._process is not None and self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        deadline = time.monotonic() + GRACE_S
        # A process that was just starting shows up late, so look again until none is left.
        while (left := list(processes_of(self.run.path))) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1)


def processes_of(run: Path) -> Iterator[psutil.Process]:
    """Yield the processes of a run that are alive, all but this one."""
    forked = prefork.process_name(str(run))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            own = process.name() == forked or process.environ().get(prefork.RUN) == str(run)
            if own and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                yield process


class SignOfLife:
    """Watches the files that a run writes to: a run whose log and metrics no longer grow is stuck."""

    def __init__(self, files: Sequence[Path], limit_s: float) -> None:
        self._files, self._limit_s = files, limit_s
        self._sizes: list[int] = []
        self._since = time.monotonic()

    def lost(self) -> bool:
        """Return whether nothing was written for as long as the limit; call it again and again."""
        sizes = [file.stat().st_size if file.exists() else 0 for file in self._files]
        if sizes != self._sizes:
            self._sizes, self._since = sizes, time.monotonic()
        return time.monotonic() - self._since > self._limit_s
