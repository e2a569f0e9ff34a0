"""A run that fails because a node died says which one."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayTaskError

from goldilocks.launch import machine
from goldilocks.launch.machine import NodeLost, is_broken, naming_lost_nodes

# What the survivors of a killed node said.
GLOO = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:36574. "
    "This is a secondary failure: some other rank has failed and its process has terminated."
)
ACTOR = ActorDiedError(
    ActorDiedErrorContext(
        class_name="WorkerDict", actor_id=bytes(16), error_message="The actor died because its node has died."
    )
)
ROLLOUTS = RuntimeError(
    "64 rollouts failed in a row; the first said: ActorUnavailableError: The actor 01 is unavailable: The actor is "
    "temporarily unavailable: RpcError: RPC Error message: failed to connect to all addresses; rpc_code: 14"
)
OURS = KeyError("reward")


class Cluster:
    """The nodes of a Ray, as ``ray.nodes`` lists them; ``later`` die when they are looked at so many times more."""

    def __init__(self, *addresses: str) -> None:
        self.alive = dict.fromkeys(addresses, True)
        self.later: dict[str, int] = {}

    def nodes(self) -> list[dict[str, Any]]:
        self.later = {address: looks - 1 for address, looks in self.later.items()}
        self.alive |= {address: False for address, looks in self.later.items() if looks < 0}
        return [{"NodeID": f"id-{one}", "NodeManagerAddress": one, "Alive": up} for one, up in self.alive.items()]


class Runner:
    """verl's task runner class, to which nothing happens."""

    def options(self, **options: Any) -> Runner:
        return self

    def remote(self) -> None:
        pass


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster("10.0.0.1", "10.0.0.2", "10.0.0.3")
    made.alive["10.0.0.3"] = False  # before the run began
    monkeypatch.setattr(ray, "nodes", made.nodes)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(machine, "POLL_S", 0.0)
    return made


def run(cluster: Cluster, error: Exception, *, dies_after: int | None = None) -> None:
    """A run on the cluster that ends with the error; the second node is found dead at the look after so many."""
    with naming_lost_nodes(Runner()) as watched:
        watched.options(runtime_env={}).remote()
        if dies_after is not None:
            cluster.later["10.0.0.2"] = dies_after
        raise error


@pytest.mark.parametrize("error", [GLOO, ACTOR, ROLLOUTS], ids=["gloo", "actor", "rollouts"])
@pytest.mark.parametrize("looks", [0, 7], ids=["found at once", "found later"])
def test_the_node_that_died_is_named_before_what_it_broke(cluster: Cluster, error: Exception, looks: int) -> None:
    with pytest.raises(NodeLost, match=r"^node 10\.0\.0\.2 died: ") as raised:
        run(cluster, error, dies_after=looks)
    assert str(error).split(".")[0] in str(raised.value)


def test_what_no_node_caused_is_raised_as_it_is_and_at_once(cluster: Cluster) -> None:
    with pytest.raises(KeyError, match="reward"):
        run(cluster, OURS)


def test_a_broken_connection_is_raised_as_it_is_if_every_node_lives(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "NOTICE_S", 0.01)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        run(cluster, GLOO)


def test_a_run_on_one_node_waits_for_nothing(cluster: Cluster) -> None:
    cluster.alive["10.0.0.2"] = False
    with pytest.raises(ActorDiedError):
        run(cluster, ACTOR)


def test_an_error_is_looked_at_inside_of_what_ray_wraps_around_it() -> None:
    assert is_broken(RayTaskError("run", "traceback", GLOO))
    assert is_broken(RayTaskError("run", "traceback", ACTOR))
    assert not is_broken(RayTaskError("run", "traceback", OURS))
