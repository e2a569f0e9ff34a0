"""Ends the processes of a run: ``python -m goldilocks.launch.reaper RUN_DIRECTORY SUPERVISOR`` once its input ends.

Ray's daemons leave the driver's process group and session, so the processes of a run are found by variables that all of
them inherit. The supervisor ends them when the driver has ended. After ``kill -9`` of the supervisor the reaper does: a
process that the supervisor starts before the driver, whose standard input is a pipe that the supervisor alone can write
to. Ray ends its own processes too, but those that are still starting take as long as their imports to notice.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

RUN = "GOLDILOCKS_RUN"  # the run directory
SUPERVISOR = "GOLDILOCKS_SUPERVISOR"  # the supervisor's process id: a run may have been started again by another
LIMIT_S = 10.0
LOOKS, PAUSE_S = 3, 1.0  # a driver that the supervisor was just starting when it ended shows up late


def processes_of(run: Path, supervisor: int | None = None) -> Iterator[psutil.Process]:
    """Yield the processes of a run that are alive, all but this one: of one supervisor, or of any."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            found = process.environ()
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


def main(run: Path, supervisor: int) -> None:
    """Wait for the supervisor's end, then end what it has started."""
    sys.stdin.buffer.read()
    for _ in range(LOOKS):
        end_processes(run, supervisor)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
