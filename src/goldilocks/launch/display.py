"""What a run shows: one live line on a terminal; without a terminal, a line per validation and per tenth of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rich.console import Console

from goldilocks.runs.progress import Progress, clock

Draw = Callable[[str | None], None]


class Board:
    """``with Board(console) as board: board.draw(name, text)``: a live line for each name, in their order."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("starting")
        self._lines: dict[str, str] = {}
        self._lock = threading.Lock()  # the arms of a study draw from their own threads

    def __enter__(self) -> Board:
        if self._status.console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def draw(self, name: str, text: str | None) -> None:
        """Show this text for ``name``; None removes its line."""
        with self._lock:
            self._lines.pop(name, None)
            if text is not None:
                self._lines[name] = text
            shown = "\n".join(self._lines[name] for name in sorted(self._lines))
            self._status.update(shown or " ")  # rich takes an empty text for none, and keeps the last one


class LiveLine:
    """The line of one run.

    ``draw`` puts it on a board; ``frame`` adds what is shown around it. ``notice`` is asked after each step until it
    returns a sentence, which is printed above the line.
    """

    def __init__(
        self,
        console: Console,
        draw: Draw,
        frame: Callable[[str, Progress, float], str] = lambda line, progress, elapsed: line,
        notice: Callable[[Progress], str | None] = lambda progress: None,
    ) -> None:
        self._console, self._draw, self._frame, self._notice = console, draw, frame, notice
        self._noticed, self._printed = False, (-1, 0)

    def close(self) -> None:
        self._draw(None)

    def show(self, news: bool, progress: Progress, elapsed: float) -> None:
        """Show the state of the run; ``news`` says whether it has changed."""
        if news and not self._noticed and (said := self._notice(progress)):
            self._noticed = True
            self._console.print(f"goldilocks: {said}", highlight=False, markup=False, soft_wrap=True)
        if self._console.is_terminal:
            begun = progress.validations or progress.steps_done
            line = progress.line() if begun else f"starting Ray and verl · {clock(elapsed)}"
            self._draw(self._frame(line, progress, elapsed))
        elif news:
            at = (int(progress.done * 10), len(progress.validations))
            if at != self._printed:
                self._printed = at
                print(self._frame(progress.line(), progress, elapsed), flush=True)
