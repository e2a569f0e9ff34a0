"""``rollout.name=transformers`` in verl's two tables: the replica on the server's side, the adapter on the worker's.

Both are named here and imported only by the process that asks for one.
"""

from __future__ import annotations

from goldilocks.rollout.limits import NAME


def register_replica() -> None:
    """verl calls the loader when a run asks for this server."""
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

    def load() -> type[RolloutReplica]:
        from goldilocks.rollout.replica import TransformersReplica

        return TransformersReplica

    RolloutReplicaRegistry.register(NAME, load)


def register_adapter() -> None:
    """verl has no function for adapters, only the table."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    _ROLLOUT_REGISTRY[(NAME, "async")] = "goldilocks.rollout.adapter.TransformersAdapter"
