"""The live line of a command: on a terminal it is drawn again and again; a log has a line now and then."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from rich.console import Console
from rich.text import Text

from goldilocks.runs.costs import Progress, clock

EVERY_S = 10.0  # between the lines of a command that counts parts, where it has no terminal: a quick one prints none


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
            self._status.update(Text(shown or " "))  # rich takes an empty text for none, and keeps the last one


class LiveLine:
    """The line of one run.

    ``draw`` puts it on a board; ``frame`` adds what is shown around it. ``notice`` is asked after each step until it
    returns a sentence, which is printed above the line. Without a terminal a line is printed per validation and per
    tenth of the run, ``every_s`` seconds after the one before at the earliest.
    """

    def __init__(
        self,
        console: Console,
        draw: Callable[[str | None], None],
        frame: Callable[[str, Progress, float], str] = lambda line, progress, elapsed: line,
        notice: Callable[[Progress], str | None] = lambda progress: None,
        every_s: float = 0.0,
    ) -> None:
        self._console, self._draw, self._frame, self._notice = console, draw, frame, notice
        self._noticed, self._printed = False, (-1, 0)
        self._every_s, self._not_before = every_s, every_s

    def close(self) -> None:
        self._draw(None)

    def show(self, news: bool, progress: Progress, elapsed: float) -> None:
        """Show the state of the run; ``news`` says whether it has changed."""
        if news and not self._noticed and (said := self._notice(progress)):
            self._noticed = True
            self._console.print(f"goldilocks: {said}", highlight=False, markup=False, soft_wrap=True)
        if self._console.is_terminal:
            begun = progress.validations or progress.steps_done
            self._draw(self._frame(progress.line() if begun else f"starting · {clock(elapsed)}", progress, elapsed))
        elif news:
            at = (int(progress.done * 10), len(progress.validations))
            if at != self._printed and elapsed >= self._not_before:
                self._printed, self._not_before = at, elapsed + self._every_s
                print(self._frame(progress.line(), progress, elapsed), file=self._console.file, flush=True)


@contextlib.contextmanager
def counted(total: int, unit: str) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with the name of each part when it begins; the parts that have ended are counted."""
    console, progress, started = Console(stderr=True), Progress(total, 0, unit=unit), time.monotonic()
    names: list[str] = []
    with Board(console) as board:
        line = LiveLine(console, partial(board.draw, unit), lambda said, *_: f"{names[-1]} · {said}", every_s=EVERY_S)

        def begin(name: str) -> None:
            elapsed = time.monotonic() - started
            if names:
                progress.step += 1
                progress.seconds = [elapsed / progress.step]  # they end in waves: the last ones say little
            names.append(name)
            line.show(True, progress, elapsed)

        yield begin
