"""Finished rollouts, kept on the driver until they are trained or let go.

A row is everything verl's batch holds of one rollout. Rows are copied out of the generation batch they came with, so
that a dropped group's memory is free at once; a saved store holds tensors as safetensors and all else as JSON, and
loading it executes no code.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from verl import DataProto

from goldilocks.verl.row_json import dump_values

TENSORS, VALUES = "tensors.safetensors", "values.json"


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout: a tensor or a value for each field."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]

    def with_fields_of(self, other: Row) -> Row:
        """Both rows' fields; the other's where both have one."""
        return Row({**self.tensors, **other.tensors}, {**self.values, **other.values})


class RowStore:
    """Rows by group and by their number in it."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[int, Row]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def put(self, uid: str, index: int, row: Row) -> None:
        """Keep a row."""
        self._groups.setdefault(uid, {})[index] = row

    def retain(self, uids: Collection[str]) -> None:
        """Let go of every other group."""
        self._groups = {uid: rows for uid, rows in self._groups.items() if uid in uids}

    def batch(self, places: Iterable[tuple[str, int]]) -> DataProto:
        """The rows of these (group, number) pairs, in this order, with their group's name as ``uid``."""
        pairs = list(places)
        rows = [self._groups[uid][index] for uid, index in pairs]
        tensors = {name: torch.stack([row.tensors[name] for row in rows]) for name in rows[0].tensors}
        names = dict.fromkeys(name for row in rows for name in row.values)
        values = {name: _column([row.values.get(name) for row in rows]) for name in names}
        values["uid"] = _objects([uid for uid, _ in pairs])
        return DataProto.from_dict(tensors=tensors, non_tensors=values)

    def save(self, places: Iterable[tuple[str, int]], folder: Path) -> None:
        """Write the rows of these (group, number) pairs."""
        folder.mkdir(parents=True, exist_ok=True)
        pairs = list(places)
        rows = [self._groups[uid][index] for uid, index in pairs]
        names = rows[0].tensors if rows else ()
        text = dump_values([[*pair, dict(row.values)] for pair, row in zip(pairs, rows, strict=True)])
        save_file({name: torch.stack([row.tensors[name] for row in rows]) for name in names}, folder / TENSORS)
        (folder / VALUES).write_text(text)

    def load(self, folder: Path) -> None:
        """Take back what ``save`` wrote."""
        tensors = load_file(folder / TENSORS)
        for place, (uid, index, values) in enumerate(json.loads((folder / VALUES).read_text())):
            self.put(uid, index, Row({name: column[place].clone() for name, column in tensors.items()}, values))


def rows_of(batch: DataProto) -> Iterator[Row]:
    """The batch, row by row."""
    columns = {name: column.unbind(0) for name, column in batch.batch.items()}
    for place in range(len(batch)):
        tensors = {name: column[place].clone() for name, column in columns.items()}
        yield Row(tensors, {name: column[place] for name, column in batch.non_tensor_batch.items()})


def _column(values: list[Any]) -> np.ndarray:
    """Numbers as numbers, as verl has them; anything else as objects."""
    if all(isinstance(value, (bool, int, float, np.generic)) for value in values):
        return np.array(values)
    return _objects(values)


def _objects(values: list[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
