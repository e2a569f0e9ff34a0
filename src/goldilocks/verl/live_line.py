"""One live line on a terminal; where there is none, a line for every validation and every tenth of the way."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status

from goldilocks.verl.progress import Progress, clock


class LiveLine:
    """``with LiveLine(console) as line: line.show(…)``"""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = console.status("starting") if console.is_terminal else None
        self._printed = (-1, 0)

    def __enter__(self) -> LiveLine:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the live line away, so that what is printed next stands alone."""
        if self._status is not None:
            self._status.stop()

    def show(self, news: bool, progress: Progress, elapsed: float) -> None:
        """Draw the state of the run."""
        if self._status is not None:
            waiting = f"starting Ray and verl · {clock(elapsed)}"
            self._status.update(progress.line() if progress.validations or progress.steps_done else waiting)
        elif news:
            at = (int(progress.done * 10), len(progress.validations))
            if at != self._printed:
                self._printed = at
                print(progress.line(), flush=True)
