"""A batch of short rows, fetched once and held by the trainer's process while it computes on it.

verl fetches the rows for the advantages, stores the advantages, has the training workers fetch the rows with them, and
fetches again for the metrics. Each of these is two to four messages through the TransferQueue, one after another, and
each message describes every row. Where no other process reads what is computed on the rows, they are fetched here once,
their advantages stay here, and the workers are sent their rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import starmap
from typing import Any

import torch
import transfer_queue
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue import BatchMeta, KVBatchMeta
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from verl.protocol import BatchData
from verl.utils.tensordict_utils import assign_non_tensor_data
from verl.utils.transferqueue_utils import _async_meta_to_realdata, tqbridge

from goldilocks.verl.store.batched_puts import is_read_by
from goldilocks.verl.store.padding import Flat, Ragged, flat, joined, tokens_at, unflat
from goldilocks.verl.store.rows import NOT_COMPUTED_WITH, PARTITION, is_tensor
from goldilocks.verl.store.rows_at_hand import RowsAtHand

LONGEST = 2**18  # tokens of a batch that is held: about 16 MB

# The functions that read a ``HeldPart``, its messages, or the description that it is fetched by.
READERS: tuple[tuple[Callable[..., Any], str], ...] = (
    (BatchData.chunk, "64e9f8d67c3b88c1"),
    (tqbridge, "eb2612d8e1ae27bd"),
    (_async_meta_to_realdata, "8fe49350dfdb1351"),
    (AsyncSimpleStorageManager.get_data, "714caa08c927bdae"),
)

Columns = dict[str, Any]  # of each field rows of tokens, ragged or nested, or a tensor of a number for each row
Others = Callable[[Sequence[str]], Columns]


class HeldBatch:
    """The rows of a batch, in order; ``others`` finds those of its fields that are not among the columns."""

    def __init__(self, keys: Sequence[str], columns: Columns, others: Others, *, in_queue: bool) -> None:
        self.keys = list(keys)
        self._columns = columns
        self._others = others
        self._in_queue = in_queue

    @classmethod
    def of(cls, rows: RowsAtHand, keys: Sequence[str]) -> HeldBatch | None:
        """Hold rows that are at hand; None if one is not."""
        return cls(keys, rows.tokens(keys), partial(_others, rows, keys), in_queue=False) if rows.has(keys) else None

    @classmethod
    def fetch(cls, keys: Sequence[str]) -> HeldBatch | None:
        """Fetch all tensors of the rows; None if a row is not there, or has tensors of more than one dimension."""
        if not can_hold():
            return None
        meta = transfer_queue.get_client().kv_retrieve_meta(keys=list(keys), partition_id=PARTITION, create=False)
        tensors = [name for name, about in meta.field_schema.items() if is_tensor(about)]
        names = [name for name in tensors if name not in NOT_COMPUTED_WITH]
        if meta.size != len(keys) or not names:
            return None
        columns = _fetched(meta, names)
        others = partial(_fetched, meta)
        return cls(keys, columns, others, in_queue=True) if all(map(_is_of_rows, columns.values())) else None

    def __contains__(self, name: str) -> bool:
        """Whether all rows have tokens of this field."""
        return name in self._columns

    def get(self, names: Iterable[str]) -> TensorDict:
        """Those of the fields that the rows have, as ``transfer_queue.kv_batch_get`` returns them."""
        wanted = list(names)
        here = {name: self._nested(name) for name in wanted if name in self._columns}
        others = self._others([name for name in wanted if name not in here])
        return TensorDict({**here, **others}, batch_size=len(self.keys))

    def _nested(self, name: str) -> torch.Tensor:
        """The column as the queue returns it. torch takes long to make one, and few are read here."""
        if isinstance(column := self._columns[name], Ragged):
            self._columns[name] = joined(column.tokens, column.offsets)
        return self._columns[name]

    def put(self, fields: TensorDict) -> None:
        """Hold these fields too, or in the place of those that were fetched."""
        self._columns |= dict(fields.items())

    def in_queue(self, keys: list[str]) -> list[str]:
        """Those of the keys that the queue has."""
        held = set() if self._in_queue else set(self.keys)
        return [key for key in keys if key not in held]

    def part(self, batch: KVBatchMeta) -> HeldPart:
        """The tensors of these rows, to be sent."""
        place = {key: number for number, key in enumerate(self.keys)}
        return HeldPart(self._columns, torch.tensor([place[key] for key in batch.keys]), batch.extra_info)


class HeldPart(BatchMeta):
    """Rows in the place of their description: what verl's worker group divides among ranks are the rows themselves."""

    def __init__(self, columns: Columns, places: torch.Tensor, extra_info: dict[str, Any]) -> None:
        super().__init__(places.tolist(), [PARTITION] * len(places), extra_info=extra_info)
        self._columns, self._places = columns, places

    def chunk(self, chunks: int) -> list[Any]:
        """The message of each rank."""
        return [Message(self._columns, part, self.extra_info) for part in self._places.chunk(chunks)]


class Message:
    """The rows of one rank; the worker that unpickles it has the ``TensorDict`` that verl would have fetched."""

    def __init__(self, columns: Columns, places: torch.Tensor, extra_info: dict[str, Any]) -> None:
        self._columns, self._places, self._extra_info = columns, places, extra_info

    def __reduce__(self) -> tuple[Any, ...]:
        """Fields whose rows have the same lengths share the places of their tokens."""
        known: list[tuple[torch.Tensor, Flat, torch.Tensor]] = []  # offsets; of the rows picked: offsets, tokens
        packed = {name: self._packed(rows, known) for name, rows in self._columns.items()}
        return received, (len(self._places), packed, self._extra_info)

    def _packed(self, rows: Any, known: list[tuple[torch.Tensor, Flat, torch.Tensor]]) -> Any:
        if isinstance(rows, Ragged):
            tokens, offsets = rows.tokens, rows.offsets
        elif rows.is_nested:
            tokens, offsets = rows.values(), rows.offsets()
        else:
            return rows[self._places]
        alike = next((one for one in known if torch.equal(one[0], offsets)), None)
        if alike is None:
            chosen, begins = tokens_at(offsets, self._places)
            alike = offsets, flat(begins), chosen
            known.append(alike)
        return flat(tokens[alike[2]]), alike[1]


def received(size: int, packed: Mapping[str, Any], extra_info: Mapping[str, Any]) -> TensorDict:
    """As verl's ``_async_meta_to_realdata`` returns rows and what goes with them."""
    data = TensorDict({name: _restored(rows) for name, rows in packed.items()}, batch_size=size)
    for name, value in extra_info.items():
        if isinstance(value, NonTensorData | NonTensorStack):
            data[name] = value
        else:
            assign_non_tensor_data(tensor_dict=data, key=name, val=value)
    return data


@cache
def can_hold() -> bool:
    """Whether verl and the TransferQueue of this process are those that this was written for."""
    return is_read_by(READERS)


def _fetched(meta: BatchMeta, names: Sequence[str]) -> Columns:
    """Those of the fields that the rows have. ``meta.select_fields`` would copy what it knows of each row, deeply."""
    known: dict[str, dict[str, Any]] = {name: {} for name in names if name in meta.field_schema}
    if not known:
        return {}
    selected = BatchMeta(meta.global_indexes, meta.partition_ids, known, meta.production_status)
    return dict(transfer_queue.get_client().get_data(selected).items())


def _others(rows: RowsAtHand, keys: Sequence[str], names: Sequence[str]) -> Columns:
    return {name: Values.of(column) for name, column in rows.others(keys, names).items()}


class Values(torch.Tensor):
    """The values of rows that are no tensors, for a ``TensorDict``, which wraps each in an object: 6 ms for 256."""

    _of_rows: list[Any]

    @classmethod
    def of(cls, values: list[Any]) -> Values:
        made = torch.full((len(values),), math.nan).as_subclass(cls)  # plain to see where it is read as numbers
        made._of_rows = values
        return made

    def tolist(self) -> list[Any]:
        return self._of_rows


def _is_of_rows(column: Any) -> bool:
    """Whether it is a number for each row, or a row of numbers."""
    jagged = getattr(column, "is_nested", False) and column.layout == torch.jagged and column.lengths() is None
    return isinstance(column, torch.Tensor) and column.dim() == (2 if jagged else 1)


def _restored(rows: torch.Tensor | tuple[Flat, Flat]) -> torch.Tensor:
    return joined(*starmap(unflat, rows)) if isinstance(rows, tuple) else rows
