"""A run that joins a Ray of others tells it what its own would have inherited, and says which node died; runs on one
machine share its cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayTaskError
from run_files import write_task

from goldilocks.cli import main
from goldilocks.config.recipes import choose
from goldilocks.launch import machine
from goldilocks.launch.machine import (
    SIZES,
    THREADS,
    NodeLost,
    find_device,
    is_broken,
    is_private,
    naming_lost_nodes,
    share_of_cores,
)
from goldilocks.launch.train import Launch, prepared


@pytest.fixture
def arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOLDILOCKS_TASK", str(write_task(tmp_path / "arithmetic")))


def launch(tmp_path: Path, *words: str) -> Launch:
    with prepared(choose(words, "cpu"), tmp_path / "runs", "test") as ready:
        return ready


@pytest.mark.usefixtures("arithmetic")
def test_a_run_has_a_ray_of_its_own_with_a_secret_of_its_own(tmp_path: Path) -> None:
    ready = launch(tmp_path)
    assert is_private(ready.config)
    assert ready.config.ray_kwargs.ray_init.num_gpus == 1
    assert ready.env["RAY_AUTH_TOKEN_PATH"] == str(ready.run_dir.secret)


@pytest.mark.usefixtures("arithmetic")
def test_a_run_that_joins_brings_its_environment_and_no_sizes(tmp_path: Path) -> None:
    own = "++ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS='3'"
    ready = launch(tmp_path, "++ray_kwargs.ray_init.address=auto", own)
    ray_init = ready.config.ray_kwargs.ray_init
    assert not is_private(ready.config)
    assert ray_init.address == "auto"
    assert [size for size in SIZES if size in ray_init] == []
    handed_on = ray_init.runtime_env.env_vars
    assert handed_on["VERL_FILE_LOGGER_PATH"] == str(ready.run_dir.metrics)
    assert (handed_on["VERL_PLATFORM"], handed_on["OMP_NUM_THREADS"]) == ("cpu", "3")
    assert "RAY_AUTH_TOKEN_PATH" not in ready.env
    assert "runtime_env" in ready.run_dir.config.read_text()


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("word", ["+ray_kwargs.ray_init={address: '10.0.0.1:6379'}", "{recipe}"])
def test_the_address_of_a_ray_is_kept_where_a_recipe_or_several_keys_at_once_name_it(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "joins.yaml"
    recipe.write_text("ray_kwargs: {ray_init: {address: '${oc.env:HEAD}:6379'}}\n")
    monkeypatch.setenv("HEAD", "10.0.0.1")
    ray_init = launch(tmp_path, word.replace("{recipe}", str(recipe))).config.ray_kwargs.ray_init
    assert ray_init.address == "10.0.0.1:6379"
    assert not {"_temp_dir", "_node_ip_address", *SIZES} & set(ray_init)


@pytest.mark.usefixtures("arithmetic")
def test_overrides_win_over_the_address_of_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "joins.yaml"
    recipe.write_text("ray_kwargs: {ray_init: {address: '10.0.0.1:6379'}}\n")
    ready = launch(tmp_path, str(recipe), "ray_kwargs.ray_init.address=local")
    assert is_private(ready.config)
    assert "_temp_dir" in ready.config.ray_kwargs.ray_init


@pytest.mark.parametrize(
    ("files", "device"), [(["nvidia0", "nvidiactl"], "cuda"), (["dxg"], "cuda"), (["nvidiactl", "null"], "cpu")]
)
def test_a_gpu_is_found_by_its_device_file_under_wsl2_too(
    files: list[str], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(machine, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_device() == device
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_device() == "cpu"


def test_runs_at_the_same_time_share_the_cores_unless_the_user_has_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert share_of_cores(1) == {}
    assert share_of_cores(5) == {THREADS: "3"}
    assert share_of_cores(40) == {THREADS: "1"}
    monkeypatch.setenv(THREADS, "7")
    assert share_of_cores(5) == {}


@pytest.mark.parametrize(
    ("answer", "device"),
    [
        ('echo \'{"GPU": 8.0, "CPU": 64.0, "accelerator_type:H200": 1.0}\'', "cuda"),
        ('echo \'{"GPU": 2.0, "CPU": 4.0}\'', "cpu"),  # ranks on the CPU, which Ray counts as GPUs
    ],
)
def test_without_a_gpu_here_the_cluster_that_is_joined_is_asked(
    answer: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the place of Python stands a program that answers as a Ray would."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    probe = tmp_path / "python"
    probe.write_text(f"#!/bin/sh\n{answer}\n")
    probe.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(probe))
    recipe = tmp_path / "joins.yaml"
    recipe.write_text("ray_kwargs: {ray_init: {address: '10.0.0.1:6379'}}\n")
    for words, found in (
        (["++ray_kwargs.ray_init.address=10.0.0.1:6379"], device),
        (["+ray_kwargs.ray_init={address: '10.0.0.1:6379'}"], device),
        ([str(recipe)], device),
        ([str(recipe), "++ray_kwargs.ray_init.address=local"], "cpu"),
        ([], "cpu"),
    ):
        assert main(["train", *words, "--cfg", "job"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["trainer"]["device"] == found


def test_a_cluster_that_does_not_answer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[[list[str]], str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("sys.executable", "/bin/false")
    said = refused(["train", "++ray_kwargs.ray_init.address=10.0.0.1:6379", "--runs", str(tmp_path)])
    assert "ray_kwargs.ray_init.address='10.0.0.1:6379' is not accepted: the address of a Ray that is running" in said
    assert list(tmp_path.iterdir()) == []


# -- nodes that die ----------------------------------------------------------------------------------------------------


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


def test_what_no_node_caused_is_raised_as_it_is_and_at_once_and_anything_on_one_node(cluster: Cluster) -> None:
    with pytest.raises(KeyError, match="reward"):
        run(cluster, OURS)
    cluster.alive["10.0.0.2"] = False
    with pytest.raises(ActorDiedError):
        run(cluster, ACTOR)


def test_a_broken_connection_is_raised_as_it_is_if_every_node_lives(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "NOTICE_S", 0.01)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        run(cluster, GLOO)


def test_an_error_is_looked_at_inside_of_what_ray_wraps_around_it() -> None:
    assert is_broken(RayTaskError("run", "traceback", GLOO))
    assert is_broken(RayTaskError("run", "traceback", ACTOR))
    assert not is_broken(RayTaskError("run", "traceback", OURS))
