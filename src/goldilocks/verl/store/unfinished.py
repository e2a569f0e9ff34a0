"""What rollouts in flight have been answered so far: saved with the collector, and given back when it asks again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from goldilocks.types import Request
from goldilocks.verl.store.stored_rows import load_rows, save_rows

Saved = list[Any]  # [uid, index, answers] of an unfinished rollout


class Unfinished:
    """``answers`` asks those who make the rollouts."""

    def __init__(self, answers: Callable[[], list[Saved]]) -> None:
        self._answers = answers
        self._loaded: dict[tuple[str, int], Any] = {}

    def save(self, folder: Path) -> None:
        """Write what every unfinished rollout has been answered, those of this run that have not begun again too."""
        waiting = [[uid, index, answers] for (uid, index), answers in self._loaded.items()]
        save_rows([*self._answers(), *waiting], folder)

    def load(self, folder: Path) -> Collection[tuple[str, int]]:
        """Take back what ``save`` wrote; return the rollouts that can go on."""
        if folder.exists():  # a checkpoint of an earlier version has none
            self._loaded = {(uid, index): answers for uid, index, answers in load_rows(folder)}
        return self._loaded.keys()

    def retain(self, alive: Collection[str]) -> None:
        """Forget the answers of every group but these."""
        self._loaded = {name: answers for name, answers in self._loaded.items() if name[0] in alive}

    def give(self, request: Request) -> dict[int, Any]:
        """The answers of the rollouts that are asked for, by index; each is given once."""
        names = ((request.uid, index) for index in range(request.first, request.first + request.n))
        return {name[1]: self._loaded.pop(name) for name in names if name in self._loaded}
