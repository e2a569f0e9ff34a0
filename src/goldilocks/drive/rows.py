"""Where the rows of rollouts wait until they are trained: tensors and texts, which never pass through the core."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from goldilocks.types import Rollout

Place = tuple[str, int]  # a rollout: its group, and its number in the group
Row = TypeVar("Row")


class RowStore(ABC, Generic[Row]):
    """Rows by the rollout they are of. The backend puts them, before it tells of the rollout."""

    @abstractmethod
    def put(self, place: Place, row: Row) -> None:
        """Keep a row."""

    @abstractmethod
    def get(self, places: Sequence[Place]) -> Sequence[Row]:
        """Return the rows of these rollouts, in this order."""

    @abstractmethod
    def retain(self, alive: Collection[str]) -> None:
        """Free the rows of every group but these."""

    @abstractmethod
    def save(self, rollouts: Iterable[Rollout], folder: Path) -> None:
        """Write what a later batch needs: the rows of these rollouts. Loading must execute no code."""

    @abstractmethod
    def load(self, folder: Path) -> Collection[Place]:
        """Take back what ``save`` wrote; return the unfinished rollouts that can go on from what they had written."""


class MemoryRows(RowStore[Row]):
    """Rows in the memory of this process, by group."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[int, Row]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.groups.values()))

    def __getitem__(self, place: Place) -> Row:
        return self.groups[place[0]][place[1]]

    def put(self, place: Place, row: Row) -> None:
        self.groups.setdefault(place[0], {})[place[1]] = row

    def get(self, places: Sequence[Place]) -> list[Row]:
        return [self[place] for place in places]

    def retain(self, alive: Collection[str]) -> None:
        self.groups = {uid: rows for uid, rows in self.groups.items() if uid in alive}

    def items(self) -> Iterator[tuple[Place, Row]]:
        """Yield every row with its place."""
        return (((uid, index), row) for uid, rows in self.groups.items() for index, row in rows.items())

    def of_groups(self, rollouts: Iterable[Rollout]) -> dict[Place, Row]:
        """Return every row of the groups that these rollouts are of: a baseline needs the untrained ones too."""
        uids = {rollout.uid for rollout in rollouts}
        return {place: row for place, row in self.items() if place[0] in uids}


class NoRows(RowStore[Any]):
    """For a trainer that has all it needs in the payloads."""

    def put(self, place: Place, row: Any) -> None:
        raise ValueError(f"a row of {place} was put where none is kept")

    def get(self, places: Sequence[Place]) -> list[Any]:
        raise ValueError("no rows are kept here")

    def retain(self, alive: Collection[str]) -> None:
        """Do nothing."""

    def save(self, rollouts: Iterable[Rollout], folder: Path) -> None:
        """Do nothing."""

    def load(self, folder: Path) -> tuple[()]:
        return ()
