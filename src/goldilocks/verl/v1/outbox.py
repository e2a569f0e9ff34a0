"""Rollouts that end together are put into the TransferQueue together.

verl's worker packs and puts each trajectory by itself, which costs it more than everything else it does for one. Here
what arrives while a put is under way goes with the next: no timer, and nobody waits when there is nothing to wait for.
Invariant: a put returns when its own rows are stored, and raises what storing them raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import transfer_queue
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

Row = tuple[str, dict[str, Any], dict[str, Any]]  # its key, its fields, its tag
Put = Callable[[str, list[Row]], Awaitable[None]]


class Outbox:
    """Gathers what is to be put, by partition and by the names of the fields, which a put has in common."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._waiting: list[tuple[str, Row, asyncio.Future[None]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def send(self, partition: str, rows: list[Row]) -> None:
        """Returns when these rows are stored."""
        stored = [asyncio.get_running_loop().create_future() for _ in rows]
        self._waiting += [(partition, row, future) for row, future in zip(rows, stored, strict=True)]
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        await asyncio.gather(*stored)

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                alike: dict[tuple[str, ...], list[tuple[Row, asyncio.Future[None]]]] = {}
                for partition, row, future in waiting:
                    alike.setdefault((partition, *sorted(row[1])), []).append((row, future))
                for (partition, *_), pairs in alike.items():
                    await self._send(partition, pairs)
        finally:  # however it ended, the next to come starts anew
            self._sending = None

    async def _send(self, partition: str, pairs: list[tuple[Row, asyncio.Future[None]]]) -> None:
        try:
            await self._put(partition, [row for row, _ in pairs])
        except Exception as error:
            for _, future in pairs:
                if not future.done():
                    future.set_exception(error)
        else:
            for _, future in pairs:
                if not future.done():
                    future.set_result(None)


async def put_rows(partition: str, rows: list[Row]) -> None:
    """One put into the TransferQueue."""
    keys, fields, tags = zip(*rows, strict=True)
    packed = list_of_dict_to_tensordict(list(fields))
    await transfer_queue.async_kv_batch_put(keys=list(keys), fields=packed, tags=list(tags), partition_id=partition)


class GatheringQueue:
    """``transfer_queue`` as verl's worker sees it; only its puts of finished trajectories take another way."""

    def __init__(self) -> None:
        self._outbox = Outbox(put_rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(transfer_queue, name)

    async def async_kv_batch_put(
        self, keys: list[str], fields: list[dict[str, Any]], tags: list[dict[str, Any]], partition_id: str
    ) -> None:
        """As ``transfer_queue``'s, of fields that are not packed yet."""
        await self._outbox.send(partition_id, list(zip(keys, fields, tags, strict=True)))
