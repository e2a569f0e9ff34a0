"""The TransferQueue as verl's trainer sees it while it computes advantages.

verl fetches the uid of every row to find the rows of a group. A uid is a text: the queue wraps each in an object, and
padding the batch copies each object, which takes longer than the advantages. The key of a row begins with its uid, so
numbers of groups replace the uids here. Masks and advantages are kept until the update, which chooses its rows by them.
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

UID, MASK, ADVANTAGES = "uid", "response_mask", "advantages"
Label = Callable[[str], Any]  # of a group, by its uid


class DriverQueue:
    """``transfer_queue``; within ``advantages`` it numbers groups and keeps masks and advantages."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] | None = None
        self._unread: tuple[str, ...] = ()
        self._keys: list[str] = []
        self._kept: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(transfer_queue, name)

    @contextmanager
    def advantages(self, batch: KVBatchMeta, unread: tuple[str, ...]) -> Iterator[Label]:
        """Number the groups of the batch; fields that are ``unread`` are not fetched. Yields the number of a group."""
        uids = dict.fromkeys(split_row_key(key)[0] for key in batch.keys)
        numbers = self._numbers = {uid: number for number, uid in enumerate(uids)}
        self._unread, self._keys, self._kept = unread, list(batch.keys), {}
        try:
            yield numbers.get
        finally:
            self._numbers = None

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> TensorDict:
        """As ``transfer_queue``'s, with numbers of groups in the place of their uids, and padded at once."""
        if self._numbers is None or UID not in (select_fields or ()):
            return _fetched(keys, partition_id, select_fields)
        names = [name for name in select_fields or () if name != UID and name not in self._unread]
        data = _fetched(keys, partition_id, names)
        data[UID] = torch.tensor([self._numbers[split_row_key(key)[0]] for key in keys])
        self._kept[MASK] = data[MASK]
        return data

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict | None = None, **rest: Any) -> Any:
        """As ``transfer_queue``'s."""
        if self._numbers is not None and fields is not None:
            self._kept |= {name: fields[name] for name in (MASK, ADVANTAGES) if name in fields.keys()}  # noqa: SIM118
            fields = Columns.of_tensors(fields) if takes_columns() else fields
        return transfer_queue.kv_batch_put(keys=keys, partition_id=partition_id, fields=fields, **rest)

    def take(self, batch: KVBatchMeta) -> dict[str, torch.Tensor] | None:
        """Return the kept masks and advantages of exactly these rows, once; None if others were kept."""
        kept, self._kept = self._kept, {}
        return kept if self._keys == list(batch.keys) and kept.keys() == {MASK, ADVANTAGES} else None


def _fetched(keys: list[str], partition_id: str, names: list[str] | None) -> TensorDict:
    data = transfer_queue.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=names)
    return PaddedAtOnce.of(data)


@contextmanager
def advantages(batch: KVBatchMeta, unread: tuple[str, ...] = ()) -> Iterator[Label]:
    """Wrap verl's ``_compute_advantage``; yield the label of a group, its number or, without our queue, its uid."""
    if isinstance(trainer_base.tq, DriverQueue):
        with trainer_base.tq.advantages(batch, unread) as number:
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
