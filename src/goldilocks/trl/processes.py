"""The processes of a run (``accelerate launch``): the first one decides, and all of them see the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list, gather_object

T = TypeVar("T")


class Processes:
    """What accelerate knows of them."""

    def __init__(self, accelerator: Any) -> None:
        self.count: int = accelerator.num_processes
        self.rank: int = accelerator.process_index

    @property
    def first(self) -> bool:
        return self.rank == 0

    def decided(self, decide: Callable[[], T]) -> T:
        """Return on every process what ``decide`` returns on the first; raise on every process what it raises there."""
        if self.count == 1:
            return decide()
        if not self.first:
            value: T = self.receive()
            return value
        try:
            decided = decide()
        except Exception as error:
            self.send(error)
            raise
        self.send(decided)
        return decided

    def send(self, value: Any) -> None:
        """Send a value, or an error, from the first process to the others, which ``receive`` it."""
        if self.count > 1:
            broadcast_object_list([(None, value) if isinstance(value, Exception) else (value, None)])

    def receive(self) -> Any:
        """Return what the first process sends; raise an error that it sends."""
        box: list[Any] = [None]
        broadcast_object_list(box)
        value, error = box[0]
        if error is not None:
            raise error
        return value

    def gathered(self, items: Sequence[T]) -> list[T]:
        """Return the items of every process, those of the first process first."""
        return list(items) if self.count == 1 else list(gather_object(list(items)))

    def even(self, items: Sequence[T]) -> list[T]:
        """Return the items with the last one repeated until every process has as many."""
        return [*items, *[items[-1]] * (-len(items) % self.count)]

    def share(self, items: Sequence[T]) -> list[T]:
        """Return this process's part of items that are even: ``gathered`` puts the parts together again."""
        size = len(items) // self.count
        return list(items[self.rank * size : (self.rank + 1) * size])
