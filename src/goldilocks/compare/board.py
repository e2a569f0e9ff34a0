"""One live display for arms that run at the same time, a line for each."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console


class Board:
    """``with Board(console) as board: LiveLine(console, place=board.place(name))``"""

    def __init__(self, console: Console) -> None:
        self._status = console.status("starting")
        self._lines: dict[str, str] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Board:
        if self._status.console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._status.stop()

    def place(self, name: str) -> BoardLine:
        """Return the line of one arm."""
        return BoardLine(self, name)

    def draw(self, name: str, text: str | None) -> None:
        """Show this text for an arm; None removes its line."""
        with self._lock:
            self._lines.pop(name, None)
            if text is not None:
                self._lines[name] = text
            self._status.update("\n".join(self._lines[name] for name in sorted(self._lines)))


class BoardLine:
    """One arm's line on the board; it has the methods of rich's ``Status``."""

    def __init__(self, board: Board, name: str) -> None:
        self._board = board
        self._name = name

    def start(self) -> None:
        self._board.draw(self._name, f"{self._name} · starting")

    def update(self, text: str, /) -> None:
        self._board.draw(self._name, text)

    def stop(self) -> None:
        self._board.draw(self._name, None)
