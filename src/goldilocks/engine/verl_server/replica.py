"""A replica of the rollout server, one Ray actor beside one training worker on its device, and the worker's side of it.

Importing this module registers ``rollout.name=transformers`` in verl's tables of replicas and of the workers' adapters.
"""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name, get_resource_name, is_support_ipc
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from goldilocks.engine.verl_server import NAME, check, transfer
from goldilocks.errors import require


def server_name(replica_rank: int, role: str = "") -> str:
    """Return the name by which a worker finds the server of its replica."""
    return f"transformers_server{role}_{replica_rank}"


class TransformersReplica(RolloutReplica):
    """Launches the server on the node and device of its worker, and represents it to verl."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check(self.config, self.model_config)

    async def launch_servers(self) -> None:
        """Start the server and wait until its engine is built."""
        from goldilocks.engine.verl_server.server import RolloutServer

        node, device = await self.workers[0].__ray_call__.remote(_place)
        server = (
            ray.remote(RolloutServer)
            .options(
                name=server_name(self.replica_rank, self._role()) + self.name_suffix,
                # The server asks Ray for no GPU and uses its worker's, so Ray must not hide the devices.
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                runtime_env={"env_vars": dict.fromkeys(get_platform().ray_noset_envvars(), "1")},
                max_concurrency=self.max_concurrency,
            )
            .remote(
                config=self.config,
                model_config=self.model_config,
                replica_rank=self.replica_rank,
                visible_device=None if get_device_name() == "cpu" else device,
            )
        )
        address = await server.ready.remote()
        self.servers = [server]
        self._server_handle = server
        # The load balancer identifies servers by address; ours have no port.
        self._server_address = f"{address}:{self.replica_rank}"

    async def sleep(self) -> None:
        """As verl's; a server that keeps its cache has nothing to release and is not asked."""
        if self.config.free_cache_engine:
            await super().sleep()

    def _role(self) -> str:
        return "_reward" if self.is_reward_model else "_teacher" if self.is_teacher_model else ""


def _place(_worker: Any) -> tuple[str, str]:
    """Return the node and the device of the worker that this runs in."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[get_resource_name()][0]


class TransformersAdapter(BaseRollout):
    """The training worker's side: hands the server the weights, puts it to sleep and wakes it.

    One per training rank; a replica is one rank, so each serves the server beside it.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        check(self.config, self.model_config)
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
        accepted = f"named_tensors with rollout.name={NAME}, by rollout.checkpoint_engine.backend=naive or nccl"
        require(wire_format == "named_tensors", "wire_format", wire_format, accepted)
        if not is_support_ipc():
            await self._send_by_store(weights, global_steps)
            return
        await self._send_by_ipc(weights)
        if global_steps is not None:
            await self._server.set_global_steps.remote(global_steps)

    async def _send_by_store(self, weights: Any, global_steps: int | None) -> None:
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        last: transfer.Bucket | None = None
        async for bucket in transfer.buckets(ensure_async_iterator(weights), limit):
            if last is not None:
                await self._server.load_weights.remote(last, False)
            last = bucket
        await self._server.load_weights.remote(last, True, global_steps)  # there is no model without weights

    async def _send_by_ipc(self, weights: Any) -> None:
        handle = transfer.new_handle()
        megabytes = self.config.checkpoint_engine.update_weights_bucket_megabytes
        receiving: Any = self._server.load_weights_by_ipc.remote(handle)
        await transfer.send_by_ipc(handle, megabytes, weights, receiving)
        await receiving


RolloutReplicaRegistry.register(NAME, lambda: TransformersReplica)
# verl has no function for adapters, only the table.
_ROLLOUT_REGISTRY[(NAME, "async")] = "goldilocks.engine.verl_server.replica.TransformersAdapter"
