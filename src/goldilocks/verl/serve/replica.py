"""A replica of the rollout server: one Ray actor beside one training worker, on the same device.

Importing this module registers ``rollout.name=transformers`` in verl's tables of replicas and of the workers' adapters.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name, get_resource_name
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from goldilocks.verl.serve import limits
from goldilocks.verl.serve.limits import NAME


def server_name(replica_rank: int, role: str = "") -> str:
    """Return the name by which a worker finds the server of its replica."""
    return f"transformers_server{role}_{replica_rank}"


class TransformersReplica(RolloutReplica):
    """Launches the server on the node and device of its worker, and represents it to verl."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        limits.check(self.config, self.model_config)

    async def launch_servers(self) -> None:
        """Start the server and wait until its engine is built."""
        from goldilocks.verl.serve.server import RolloutServer

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

    def _role(self) -> str:
        return "_reward" if self.is_reward_model else "_teacher" if self.is_teacher_model else ""


def _place(_worker: Any) -> tuple[str, str]:
    """Return the node and the device of the worker that this runs in."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[get_resource_name()][0]


RolloutReplicaRegistry.register(NAME, lambda: TransformersReplica)
# verl has no function for adapters, only the table.
_ROLLOUT_REGISTRY[(NAME, "async")] = "goldilocks.verl.serve.adapter.TransformersAdapter"
