"""The training worker's side of the rollout server: hands it the weights, puts it to sleep and wakes it.

The server has no adapters. The weights of a LoRA training come merged, whether or not ``model.lora.merge`` asks for it.
"""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from verl.utils.device import is_support_ipc
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from goldilocks.errors import require
from goldilocks.verl.serve import limits, transfer
from goldilocks.verl.serve.replica import server_name


class TransformersAdapter(BaseRollout):
    """One per training rank; a replica is one rank, so each serves the server beside it."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        limits.check(self.config, self.model_config)
        self.model_config.lora["merge"] = True  # the training engine of this worker reads the same object
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._found: Any = None

    @property
    def _server(self) -> Any:
        if self._found is None:  # it is launched after the worker
            self._found = ray.get_actor(server_name(self.replica_rank))
        return self._found

    async def resume(self, tags: list[str]) -> None:
        """Take back the memory named by ``tags``."""
        await self._server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Give back what memory the server can."""
        await self._server.sleep.remote()

    @torch.no_grad()
    async def update_weights(  # type: ignore[override]  # as verl calls it
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **_peft: Any
    ) -> None:
        """Send every weight to the server, with the number of the policy update."""
        accepted = f"named_tensors with rollout.name={limits.NAME}, by rollout.checkpoint_engine.backend=naive or nccl"
        require(wire_format == "named_tensors", "wire_format", wire_format, accepted)
        await (self._send_by_ipc(weights) if is_support_ipc() else self._send_by_store(weights))
        if global_steps is not None:
            await self._server.set_global_steps.remote(global_steps)

    async def _send_by_store(self, weights: Any) -> None:
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        async for bucket in transfer.buckets(ensure_async_iterator(weights), limit):
            await self._server.load_weights.remote(bucket)

    async def _send_by_ipc(self, weights: Any) -> None:
        handle = transfer.new_handle()
        received: Any = self._server.load_weights_by_ipc.remote(handle)
        await transfer.send_by_ipc(handle, self.config.checkpoint_engine.update_weights_bucket_megabytes, weights)
        await received
