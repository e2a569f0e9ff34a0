"""Weights from the trainer to rollout servers on other devices, through Ray's object store: ``backend: ray``.

verl needs a checkpoint engine between devices that share no memory. On GPUs that is nccl; this one needs no GPU and no
process group. The first training rank puts buckets of weights into Ray's store and their references into a mailbox, one
for each transfer; every rollout worker reads all of them, in order, from the store of its node.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from goldilocks.engine.verl_server.replica import Named, buckets

NAME = "ray"


class Mailbox:
    """References to buckets, in the order they were sent, until the last, which is None."""

    def __init__(self) -> None:
        self._letters: list[list[Any] | None] = []
        self._news = asyncio.Condition()

    async def put(self, letter: list[Any] | None) -> None:
        """Add a letter: a list with one reference, so that Ray passes the reference on and not the bucket."""
        async with self._news:
            self._letters.append(letter)
            self._news.notify_all()

    async def get(self, number: int) -> list[Any] | None:
        """Return letter ``number``; waits for it."""
        async with self._news:
            await self._news.wait_for(lambda: len(self._letters) > number)
            return self._letters[number]


@CheckpointEngineRegistry.register(NAME)
class RayWeights(CheckpointEngine):
    """One in every training rank and in every rollout worker."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._bucket_size, self._is_master = bucket_size, is_master
        self._mailbox: Any = None

    def prepare(self) -> dict[str, Any]:
        """The first training rank opens a mailbox."""
        return {"mailbox": ray.remote(num_cpus=0)(Mailbox).remote() if self._is_master else None}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Everyone gets the mailbox."""
        mailbox = metadata[0]["mailbox"]
        return {"mailbox": [mailbox] * actor_wg_world_size}, {"mailbox": [mailbox] * rollout_world_size}

    def init_process_group(self, *, mailbox: Any) -> None:  # type: ignore[override]  # as ``build_topology`` says
        """Take the mailbox; there is no process group."""
        self._mailbox = mailbox

    def finalize(self) -> None:
        """Drop the mailbox; it ends, with its buckets, when the last holder drops it."""
        self._mailbox = None

    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> None:
        """Send every weight. All training ranks take part in producing one, so the others iterate too."""
        if not self._is_master:
            for _ in weights:
                pass
            return
        async for bucket in buckets(ensure_async_iterator(weights), self._bucket_size):
            await self._mailbox.put.remote([ray.put(bucket)])
        await self._mailbox.put.remote(None)

    async def receive_weights(  # type: ignore[override]  # as verl's own engines do
        self, global_steps: int | None = None
    ) -> AsyncIterator[Named]:
        """Yield every weight, in the order they were sent."""
        number = 0
        while (letter := await self._mailbox.get.remote(number)) is not None:
            for named in (await letter[0]).tensors():
                yield named
            number += 1
