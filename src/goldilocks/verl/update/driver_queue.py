"""The TransferQueue as verl's trainer sees it while it computes advantages.

verl fetches the uid of every row to find the rows of a group. A uid is a text: the queue wraps each in an object, and
padding the batch copies each object, which takes longer than the advantages. The key of a row begins with its uid, so
numbers of groups replace the uids here. Masks and advantages are kept until the update, which chooses its rows by them.
A batch that is held (``held_batch``) is read and written here, and not in the queue, until verl frees its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transfer_queue
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base

from goldilocks.runs.records import split_row_key
from goldilocks.verl.store.batched_puts import Columns, takes_columns
from goldilocks.verl.store.padding import PaddedAtOnce
from goldilocks.verl.store.rows import PARTITION
from goldilocks.verl.update.held_batch import HeldBatch, HeldPart, can_hold

UID, MASK, ADVANTAGES = "uid", "response_mask", "advantages"
Label = Callable[[str], Any]  # of a group, by its uid


class DriverQueue:
    """``transfer_queue``; within ``advantages`` it numbers groups and keeps masks and advantages."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] | None = None
        self._unread: tuple[str, ...] = ()
        self._batch = KVBatchMeta()
        self._kept: dict[str, torch.Tensor] = {}
        self._held: HeldBatch | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(transfer_queue, name)

    @contextmanager
    def advantages(self, batch: KVBatchMeta, unread: tuple[str, ...], held: HeldBatch | None) -> Iterator[Label]:
        """Number the groups of the batch; fields that are ``unread`` are not fetched. Yields the number of a group."""
        uids = dict.fromkeys(split_row_key(key)[0] for key in batch.keys)
        numbers = self._numbers = {uid: number for number, uid in enumerate(uids)}
        self._unread, self._batch, self._kept = unread, batch, {}
        self._held = held
        try:
            yield numbers.get
        finally:
            self._numbers = None

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> TensorDict:
        """As ``transfer_queue``'s, with numbers of groups in the place of their uids, and padded at once."""
        if self._numbers is None or UID not in (select_fields or ()):
            return self._fetched(keys, partition_id, select_fields)
        names = [name for name in select_fields or () if name != UID and name not in self._unread]
        data = self._fetched(keys, partition_id, names)
        data[UID] = torch.tensor([self._numbers[split_row_key(key)[0]] for key in keys])
        self._kept[MASK] = data[MASK]
        return data

    def _fetched(self, keys: list[str], partition_id: str, names: list[str] | None) -> TensorDict:
        if self._held is not None and names is not None and self._held.keys == keys:
            return PaddedAtOnce.of(self._held.get(names))
        data = transfer_queue.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=names)
        return PaddedAtOnce.of(data)

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict | None = None, **rest: Any) -> Any:
        """As ``transfer_queue``'s."""
        if self._numbers is not None and fields is not None:
            self._kept |= {name: fields[name] for name in (MASK, ADVANTAGES) if name in fields.keys()}  # noqa: SIM118
        if self._held is not None and fields is not None and self._held.keys == keys:
            self._held.put(fields)
            return KVBatchMeta(keys=keys, tags=self._batch.tags, partition_id=partition_id)
        if self._numbers is None or fields is None:
            return transfer_queue.kv_batch_put(keys=keys, partition_id=partition_id, fields=fields, **rest)
        columns = Columns.of_tensors(fields) if takes_columns() else fields
        return transfer_queue.kv_batch_put(keys=keys, partition_id=partition_id, fields=columns, **rest)

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        """As ``transfer_queue``'s. A validation clears its own rows before verl reads the metrics of the batch."""
        if partition_id == PARTITION and self._held is not None:
            keys, self._held = self._held.in_queue(keys), None
        if keys:
            transfer_queue.kv_clear(keys=keys, partition_id=partition_id)

    def take(self, batch: KVBatchMeta) -> dict[str, torch.Tensor] | None:
        """Return the kept masks and advantages of exactly these rows, once; None if others were kept."""
        kept, self._kept = self._kept, {}
        return kept if self._batch.keys == list(batch.keys) and kept.keys() == {MASK, ADVANTAGES} else None

    def part(self, batch: KVBatchMeta) -> HeldPart | None:
        """These rows of the batch that is held; None if none is."""
        return None if self._held is None else self._held.part(batch)


@contextmanager
def advantages(batch: KVBatchMeta, unread: tuple[str, ...] = (), held: HeldBatch | None = None) -> Iterator[Label]:
    """Wrap verl's ``_compute_advantage``; yield the label of a group, its number or, without our queue, its uid.

    ``held``: the batch, where it may be held until verl frees its rows, since no other process reads what is computed.
    """
    if isinstance(trainer_base.tq, DriverQueue):
        with trainer_base.tq.advantages(batch, unread, held) as number:
            yield number
    else:
        yield str


def signal(batch: KVBatchMeta) -> Any:
    """Masks and advantages of these rows, kept or from the queue."""
    kept = trainer_base.tq.take(batch) if isinstance(trainer_base.tq, DriverQueue) else None
    if kept is not None:
        return kept
    fields = [ADVANTAGES, MASK]
    return transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)


def held_part(batch: KVBatchMeta) -> HeldPart | None:
    """These rows, of the batch that is held; None where the queue has all of them."""
    return trainer_base.tq.part(batch) if isinstance(trainer_base.tq, DriverQueue) else None


def holds_batches() -> bool:
    """Whether verl's trainer reads what is held."""
    return isinstance(trainer_base.tq, DriverQueue) and can_hold()
