"""A run while it goes on: its driver is started and watched, and everything it started is ended.

Invariant: behind a ``with Supervisor(…)`` no process of the run is alive, and none is some seconds after ``kill -9`` of
the driver or of the supervisor. Ray's daemons leave the driver's process group and session, so the processes of a run
are found by variables that all of them inherit. The supervisor ends them when the driver has ended. After ``kill -9``
of the supervisor the reaper does (``python -m goldilocks.launch.supervisor RUN_DIRECTORY SUPERVISOR``): a process that
the supervisor starts before the driver, whose standard input is a pipe that the supervisor alone can write to. Ray ends
its own processes too, but those that are still starting take as long as their imports to notice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from goldilocks.runs.files import RunDir

GRACE_S = 10.0  # for the driver to stop Ray by itself
RUN = "GOLDILOCKS_RUN"  # the run directory
SUPERVISOR = "GOLDILOCKS_SUPERVISOR"  # the supervisor's process id: a run may have been started again by another
LIMIT_S = 10.0
LOOKS, PAUSE_S = 3, 1.0  # a driver that the supervisor was just starting when it ended shows up late
# A process reads as without variables while its command replaces it: young ones without any are looked at for so long.
YOUNG_S, EXEC_S = 10.0, 0.5


class Supervisor:
    """``with Supervisor(run, env) as driver: while driver.running: …``"""

    def __init__(self, run: RunDir, env: Mapping[str, str]) -> None:
        """Start the reaper, then the driver.

        Both have a session of their own: Ctrl-C in the terminal reaches only the supervisor, which then ends the run.
        """
        self.run = run
        with self.run.log.open("ab") as log:
            options: Any = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
            command = [sys.executable, "-m", "goldilocks.launch.supervisor", str(run.path), str(os.getpid())]
            self._reaper = subprocess.Popen(command, stdin=subprocess.PIPE, **options)
            command = [sys.executable, "-m", "goldilocks.launch.train", str(run.path)]
            environ = {**os.environ, **env, RUN: str(run.path), SUPERVISOR: str(os.getpid())}
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ, **options)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        """Ask the driver to stop, wait for it, and end every process that is left."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        end_processes(self.run.path, os.getpid())
        self._reaper.kill()
        self._reaper.communicate()

    @property
    def status(self) -> int | None:
        """Return the driver's exit status, None while it runs."""
        return self._process.poll()

    @property
    def running(self) -> bool:
        return self.status is None


def processes_of(run: Path, supervisor: int | None = None) -> Iterator[psutil.Process]:
    """Yield the processes of a run that are alive, all but this one: of one supervisor, or of any."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            until = min(process.create_time() + YOUNG_S, time.time() + EXEC_S)
            while not (found := process.environ()) and process.exe() and time.time() < until:
                time.sleep(0.01)
            own = found.get(RUN) == str(run) and (supervisor is None or found.get(SUPERVISOR) == str(supervisor))
            if own and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def end_processes(run: Path, supervisor: int) -> None:
    """Kill the processes of a run, and those that they start meanwhile, until none is left."""
    deadline = time.monotonic() + LIMIT_S
    while (left := list(processes_of(run, supervisor))) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)


def reap(run: Path, supervisor: int) -> None:
    """Wait for the supervisor's end, then end what it has started."""
    sys.stdin.buffer.read()
    for _ in range(LOOKS):
        end_processes(run, supervisor)
        time.sleep(PAUSE_S)


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


if __name__ == "__main__":
    reap(Path(sys.argv[1]), int(sys.argv[2]))
