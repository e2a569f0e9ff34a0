"""One live line on a terminal; without a terminal, a line per validation and per tenth of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rich.console import Console

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
