"""One live line on a terminal; without a terminal, a line per validation and per tenth of the run.

Starts the driver, watches it, and ends everything it started.

Invariant: after ``end`` no process of the run is alive. Ray's daemons leave the driver's process group and session, so
the processes of a run are found by an environment variable that they inherit.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil
from rich.console import Console

from goldilocks.launch import prefork
from goldilocks.runs.directory import RunDir
from goldilocks.runs.progress import Progress, clock


class Display(Protocol):
    """Where a line is drawn: rich's ``Status``, or a part of one."""

    def start(self) -> None: ...

    def update(self, text: str, /) -> None: ...

    def stop(self) -> None: ...


class LiveLine:
    """``with LiveLine(console) as line: line.show(…)``"""

    def __init__(
        self,
        console: Console,
        frame: Callable[[str, Progress, float], str] | None = None,
        place: Display | None = None,
        notice: Callable[[Progress], str | None] = lambda progress: None,
    ) -> None:
        """``frame`` puts the line of a run into what is around it; ``place`` is where, if others are drawn too.

        ``notice`` is asked after each step until it has something to say, which is printed above the line.
        """
        self._console, self._notice, self._noticed = console, notice, False
        self._frame = frame or (lambda line, progress, elapsed: line)
        self._status = (place or console.status("starting")) if console.is_terminal else None
        self._printed = (-1, 0)

    def __enter__(self) -> LiveLine:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the live line."""
        if self._status is not None:
            self._status.stop()

    def show(self, news: bool, progress: Progress, elapsed: float) -> None:
        """Show the state of the run."""
        if news and not self._noticed and (said := self._notice(progress)):
            self._noticed = True
            self._console.print(f"goldilocks: {said}", highlight=False, markup=False, soft_wrap=True)
        if self._status is not None:
            waiting = f"starting Ray and verl · {clock(elapsed)}"
            line = progress.line() if progress.validations or progress.steps_done else waiting
            self._status.update(self._frame(line, progress, elapsed))
        elif news:
            at = (int(progress.done * 10), len(progress.validations))
            if at != self._printed:
                self._printed = at
                print(self._frame(progress.line(), progress, elapsed), flush=True)


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def _python(self) -> list[str]:
        """The command that stands for Python: one that forks from a server where the environment names it."""
        return shlex.split(prefork.py_executable()) if prefork.SOCKET in self._env else [sys.executable]

    @property
    def status(self) -> int | None:
        """The driver's exit status, None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        """Return whether the driver is running."""
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
        while (left := list(self._processes())) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1)

    def _processes(self) -> Iterator[psutil.Process]:
        run, forked = str(self.run.path), prefork.process_name(str(self.run.path))
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                own = process.name() == forked or process.environ().get(prefork.RUN) == run
                if own and process.pid != os.getpid():
                    yield process


class SignOfLife:
    """Watches the files that a run writes to: a run whose log and metrics no longer grow is stuck."""

    def __init__(self, files: Sequence[Path], limit_s: float) -> None:
        self._files = files
        self._limit_s = limit_s
        self._sizes: list[int] = []
        self._since = time.monotonic()

    def lost(self) -> bool:
        """Return whether nothing was written for as long as the limit; to be asked again and again."""
        sizes = [file.stat().st_size if file.exists() else 0 for file in self._files]
        if sizes != self._sizes:
            self._sizes, self._since = sizes, time.monotonic()
        return time.monotonic() - self._since > self._limit_s
