"""``rollout.name=transformers`` in verl's two tables: the replica on the server's side, the adapter on the worker's.

Both are named here and imported only by the process that asks for one.
"""

from __future__ import annotations

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from goldilocks.verl.server.limits import NAME


def _replica() -> type[RolloutReplica]:
    from goldilocks.verl.server.replica import TransformersReplica

    return TransformersReplica


RolloutReplicaRegistry.register(NAME, _replica)
# verl has no function for adapters, only the table.
_ROLLOUT_REGISTRY[(NAME, "async")] = "goldilocks.verl.server.adapter.TransformersAdapter"
