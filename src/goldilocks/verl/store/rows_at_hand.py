"""Short rows that came to the trainer's process with the reports of their rollouts, and not through the TransferQueue.

A put and the fetch of a batch are four messages through the queue, one after another, and each describes every row.
Where the trainer's process holds the batch anyway (``update/held_batch.py``), rows come in the message that reports
their rollouts. ``QueueRows.to_queue`` puts those into the queue that another process is to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, starmap
from typing import Any, NamedTuple

import torch
from ray import cloudpickle

from goldilocks.verl.store.padding import Flat, Ragged, flat, tokens_at, unflat


class ShortRows(NamedTuple):
    """Rows with the same fields: what a worker reports before the rollouts that they are of."""

    keys: list[str]
    tokens: dict[str, tuple[Flat, Flat]]  # of each field: the tokens of all rows, and the length of each row
    others: dict[str, bytes]  # of each field without tokens: the values of all rows; few of them are ever read

    @classmethod
    def of(cls, keys: Sequence[str], tokens: Mapping[str, Ragged], others: Mapping[str, list[Any]]) -> ShortRows | None:
        """None if rows differ in their fields, or a field without tokens has a tensor: the queue has its own ways."""
        if any(len(rows.lengths) != len(keys) for rows in tokens.values()):
            return None
        if any(issubclass(kind, torch.Tensor) for column in others.values() for kind in set(map(type, column))):
            return None
        packed = {name: (flat(rows.tokens), flat(torch.tensor(rows.lengths))) for name, rows in tokens.items()}
        return cls(list(keys), packed, {name: cloudpickle.dumps(column) for name, column in others.items()})

    @property
    def fields(self) -> frozenset[str]:
        return frozenset((*self.tokens, *self.others))

    def values(self, name: str) -> list[Any]:
        """The values of a field without tokens."""
        found: list[Any] = cloudpickle.loads(self.others[name])
        return found


class RowsAtHand:
    """The rows that came with reports and were not forgotten since, by key."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[ShortRows, int]] = {}

    def add(self, rows: ShortRows) -> None:
        self._places |= {key: (rows, place) for place, key in enumerate(rows.keys)}

    def forget(self, keys: Iterable[str]) -> set[str]:
        """Return those of the keys whose rows were here."""
        return {key for key in keys if self._places.pop(key, None) is not None}

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of these rows are here, and have the same fields."""
        if not all(key in self._places for key in keys):
            return False
        return len({part.fields for part in self._parts(keys)}) == 1

    def tokens(self, keys: Sequence[str]) -> dict[str, Ragged]:
        """The fields of these rows that have tokens."""
        parts = self._parts(keys)
        begins = dict(zip(map(id, parts), accumulate((len(part.keys) for part in parts), initial=0), strict=False))
        places = torch.tensor([begins[id(part)] + place for part, place in map(self._places.__getitem__, keys)])
        known: dict[bytes, Any] = {}  # by the lengths of all rows: the tokens of these rows, and their lengths
        found = {}
        for name in parts[0].tokens:
            columns, lengths = zip(*(part.tokens[name] for part in parts), strict=True)
            same = b"".join(numbers for numbers, _ in lengths)
            if same not in known:
                offsets = torch.nn.functional.pad(_joined(lengths).cumsum(0), (1, 0))
                chosen, begin = tokens_at(offsets, places)
                known[same] = chosen, begin.diff().tolist()
            found[name] = Ragged(_joined(columns)[known[same][0]], known[same][1])
        return found

    def others(self, keys: Sequence[str], names: Iterable[str]) -> dict[str, list[Any]]:
        """Those of the fields without tokens that the rows have."""
        parts = self._parts(keys)
        found = {}
        for name in names:
            if name in parts[0].others:
                values = {id(part): part.values(name) for part in parts}
                found[name] = [values[id(part)][at] for part, at in map(self._places.__getitem__, keys)]
        return found

    def taken(self, keys: Iterable[str]) -> Iterator[tuple[list[str], list[dict[str, Any]]]]:
        """Forget those of the rows that are here; yield the keys and fields of those that have the same fields."""
        together: dict[frozenset[str], list[str]] = {}
        for key in keys:
            if key in self._places:
                together.setdefault(self._places[key][0].fields, []).append(key)
        for part in together.values():
            tokens = {name: rows.split() for name, rows in self.tokens(part).items()}
            columns = {**tokens, **self.others(part, self._places[part[0]][0].others)}
            self.forget(part)
            yield part, [{name: column[place] for name, column in columns.items()} for place in range(len(part))]

    def _parts(self, keys: Sequence[str]) -> list[ShortRows]:
        """The reports that these rows came with."""
        return list({id(self._places[key][0]): self._places[key][0] for key in keys}.values())


def _joined(columns: Iterable[Flat]) -> torch.Tensor:
    return torch.cat(list(starmap(unflat, columns)))
