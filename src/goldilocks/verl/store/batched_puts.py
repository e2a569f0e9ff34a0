"""Rollouts that end together are put into the TransferQueue together.

verl's worker packs and puts each trajectory by itself, which is its largest cost. Here rows that arrive while a put is
under way go with the next put; there is no timer. A put returns when its own rows are stored, or raises their error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
import transfer_queue
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from goldilocks.hashing import is_known

KeyedRow = tuple[str, dict[str, Any], dict[str, Any]]  # its key, its fields, its tag
Put = Callable[[str, list[KeyedRow]], Awaitable[None]]


class BatchedPuts:
    """Gathers rows, and puts rows of one partition that have the same fields together."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._waiting: list[tuple[str, KeyedRow, asyncio.Future[None]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def send(self, partition: str, rows: list[KeyedRow]) -> None:
        """Return when these rows are stored."""
        stored = [asyncio.get_running_loop().create_future() for _ in rows]
        self._waiting += [(partition, row, future) for row, future in zip(rows, stored, strict=True)]
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        await asyncio.gather(*stored)

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                alike: dict[tuple[str, ...], list[tuple[KeyedRow, asyncio.Future[None]]]] = {}
                for partition, row, future in waiting:
                    alike.setdefault((partition, *sorted(row[1])), []).append((row, future))
                for (partition, *_), pairs in alike.items():
                    await self._send(partition, pairs)
        finally:
            self._sending = None

    async def _send(self, partition: str, pairs: list[tuple[KeyedRow, asyncio.Future[None]]]) -> None:
        failure = None
        try:
            await self._put(partition, [row for row, _ in pairs])
        except Exception as error:
            failure = error
        for _, future in pairs:
            if not future.done():
                future.set_result(None) if failure is None else future.set_exception(failure)


async def put_rows(partition: str, rows: list[KeyedRow]) -> None:
    """One put into the TransferQueue."""
    keys, fields, tags = map(list, zip(*rows, strict=True))
    if takes_columns():
        await _put_columns(partition, keys, Columns(fields), tags)
    else:
        packed = list_of_dict_to_tensordict(fields)
        await transfer_queue.async_kv_batch_put(keys=keys, fields=packed, tags=tags, partition_id=partition)


async def _put_columns(partition: str, keys: list[str], columns: Columns, tags: list[dict[str, Any]]) -> None:
    """As ``transfer_queue.async_kv_batch_put``, but the tags are sent at the same time as the rows, not after them."""
    client = transfer_queue.get_client()
    meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition, create=True)
    if meta.size != len(keys):
        raise RuntimeError(f"the TransferQueue has places for {meta.size} of {len(keys)} rows")
    sent = Tags(meta.global_indexes, meta.partition_ids, custom_meta=tags)
    await asyncio.gather(client.storage_manager.put_data(columns, meta), client.async_set_custom_meta(sent))


class Tags(BatchMeta):
    """The tags of a put into one partition, handed out as they are: ``BatchMeta`` makes three deep copies of them."""

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        return self.custom_meta

    def chunk_by_partition(self) -> list[BatchMeta]:
        return [self]


class Columns:
    """Rows with the same fields, with the methods of a ``TensorDict`` that the TransferQueue's own storage calls.

    A ``TensorDict`` wraps every value that is no tensor in an object, which is the largest cost of a put. Here the
    values of such a field are a list.
    """

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.batch_size = (len(rows),)
        self._columns = {name: _column([row[name] for row in rows]) for name in rows[0]}

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]

    def keys(self) -> Iterable[str]:
        return self._columns.keys()

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._columns.items()


def _column(values: list[Any]) -> Any:
    """The values of a field as verl's ``list_of_dict_to_tensordict`` packs them; a list if they are no tensors."""
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    if all(value.shape == values[0].shape for value in values):
        return torch.stack(values)
    return RaggedRows.of(values)


class RaggedRows(torch.Tensor):
    """Rows of different lengths, which look like a nested tensor to the ``READERS``.

    These ask a nested tensor five times for its rows, and each time torch checks and cuts every row anew.
    """

    is_nested = True
    _rows: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, rows: Iterable[torch.Tensor]) -> RaggedRows:
        made = torch.empty(0).as_subclass(cls)
        made._rows = tuple(rows)
        return made

    def unbind(self, dim: int = 0) -> tuple[torch.Tensor, ...]:
        return self._rows


# The functions that read a put, or whose work it does, and the digests of their sources: they call no method that
# Columns lacks, and of the tags only what Tags has.
READERS: tuple[tuple[Callable[..., Any], str], ...] = (
    (transfer_queue.async_kv_batch_put, "97365dc0dded415c"),
    (AsyncTransferQueueClient.async_put, "22869a56ec9ae366"),
    (AsyncTransferQueueClient.async_set_custom_meta, "3240a157ecf45dbe"),
    (AsyncSimpleStorageManager.put_data, "26d6cfa4821c162b"),
    (AsyncSimpleStorageManager._select_by_positions, "6757e06828b8895f"),
    (extract_field_schema, "f84ad55ae5498cfb"),
    (BatchMeta.add_fields, "bf911fcb42e1470f"),
)


@cache
def takes_columns() -> bool:
    """Whether the TransferQueue of this process is the one that ``Columns`` was written for, with its own storage."""
    manager = getattr(transfer_queue.get_client(), "storage_manager", None)
    return type(manager) is AsyncSimpleStorageManager and all(is_known(reader, known) for reader, known in READERS)


class GatheringQueue:
    """``transfer_queue`` for verl's worker, with batched puts of finished trajectories."""

    def __init__(self) -> None:
        self._puts = BatchedPuts(put_rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(transfer_queue, name)

    async def async_kv_batch_put(
        self, keys: list[str], fields: list[dict[str, Any]], tags: list[dict[str, Any]], partition_id: str
    ) -> None:
        """As ``transfer_queue``'s, for fields that are not packed yet."""
        await self._puts.send(partition_id, list(zip(keys, fields, tags, strict=True)))
