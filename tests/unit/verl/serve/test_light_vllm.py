"""Processes without vLLM: an actor whose class only the actor imports, and what verl's sources say without vLLM."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import verl
from omegaconf import OmegaConf
from ray import cloudpickle
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from goldilocks.verl.serve import light_vllm
from goldilocks.verl.serve.light_vllm import Servers, begin, leave_out_ascend, light_class, read

SERVER = """
class Server:
    def __init__(self, start, *, step):
        if step == 0:
            raise ValueError("step=0")
        self.value, self.step = start, step

    def add(self, times=1):
        self.value += times * self.step
        return self.value

    async def later(self, *, times):
        return self.add(times)
"""
METHODS = ("add", "later")


@pytest.fixture
def pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The class of the actors; its module can be imported and is not."""
    (tmp_path / "heavy_server.py").write_text(SERVER)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("heavy_server", None)
    return cloudpickle.dumps(light_class(METHODS, "heavy_server", "Server"))


# -- the actor ---------------------------------------------------------------------------------------------------------


def test_a_handle_knows_the_methods_and_imports_nothing(pickled: bytes) -> None:
    light = cloudpickle.loads(pickled)
    found = {name for name, _ in inspect.getmembers(light, inspect.isfunction)}
    assert found == {"__init__", "become", *METHODS}
    assert light.__name__ == "Server"
    assert "heavy_server" not in sys.modules


def test_the_actor_is_an_instance_of_the_class(pickled: bytes) -> None:
    light = cloudpickle.loads(pickled)
    actor = light(10, step=2)
    assert type(actor) is sys.modules["heavy_server"].Server
    assert asyncio.run(light.add(actor, 2)) == 14
    assert asyncio.run(light.later(actor, times=3)) == 20
    assert actor.value == 20


def test_an_actor_that_begins_imports_and_calls_wait_until_it_is_the_server(pickled: bytes) -> None:
    light = cloudpickle.loads(pickled)

    async def calls_come_first() -> list[int]:
        actor = light()
        assert "heavy_server" in sys.modules
        assert type(actor) is light
        waiting = asyncio.gather(light.add(actor), light.later(actor, times=3))
        await asyncio.sleep(0)
        assert not waiting.done()
        await light.become(actor, 10, step=2)
        assert type(actor) is sys.modules["heavy_server"].Server
        return await waiting

    assert asyncio.run(calls_come_first()) == [12, 18]


def test_every_call_of_a_server_that_could_not_be_made_has_the_reason(pickled: bytes) -> None:
    light = cloudpickle.loads(pickled)

    async def call() -> None:
        actor = light()
        waiting = asyncio.gather(light.add(actor), return_exceptions=True)
        with pytest.raises(ValueError, match="step=0"):
            await light.become(actor, 10, step=0)
        [error] = await waiting
        assert str(error) == "step=0"
        with pytest.raises(ValueError, match="step=0"):
            await light.later(actor, times=3)

    asyncio.run(call())


# -- early actors ------------------------------------------------------------------------------------------------------


class Actors:
    """Ray's class of an actor: the actors that were made, by name."""

    def __init__(self) -> None:
        self.made: dict[str, Actor] = {}

    def options(self, *, name: str, **_: Any) -> Any:
        return SimpleNamespace(remote=lambda **given: self.made.setdefault(name, Actor(given)))

    def find(self, name: str) -> Actor:
        if name not in self.made:
            raise ValueError(name)
        return self.made[name]


class Actor:
    """What it was made with, and what it was told to become."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.told = given, dict[str, Any]()
        self._actor_id = SimpleNamespace(job_id=ray.JobID.from_int(1))
        self.become = SimpleNamespace(remote=self.told.update)


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Actors:
    """The servers of stand-ins of replicas, which have two devices each."""
    actors = Actors()

    class Replica:
        world_size, max_concurrency, server_class = 2, 1000, Servers(actors)

        def __init__(self, *_: Any) -> None:
            pass

        def _get_server_name_prefix(self) -> str:
            return "vllm_"

    monkeypatch.setattr(light_vllm, "replica", lambda: Replica)
    monkeypatch.setitem(RolloutReplicaRegistry._registry, "vllm", light_vllm.replica)
    monkeypatch.setattr(ray, "nodes", lambda: [{}])
    monkeypatch.setattr(ray, "get_actor", actors.find)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=ray.JobID.from_int(1).hex))
    for name in light_vllm.CHOOSING:
        monkeypatch.setenv(name, "all")
    return actors


def config(*overrides: str) -> Any:
    rollout = {"name": "vllm", "nnodes": 0, "n_gpus_per_node": 4, "disaggregation": {"enabled": False}}
    keys = {"actor_rollout_ref": {"rollout": rollout, "model": None}, "trainer": {"nnodes": 1, "n_gpus_per_node": 4}}
    return OmegaConf.merge(keys, OmegaConf.from_dotlist(list(overrides)))


def test_the_servers_of_all_replicas_begin_and_become_what_verl_makes(actors: Actors) -> None:
    begun = begin(config())
    assert list(actors.made) == ["vllm_server_0_0", "vllm_server_1_0"]
    assert begun == list(actors.made.values())
    server = Servers(actors).options(name="vllm_server_1_0", runtime_env={}).remote(replica_rank=1)
    assert server is begun[1]
    assert [actor.given for actor in begun] == [{}, {}]
    assert [actor.told for actor in begun] == [{}, {"replica_rank": 1}]


def test_a_server_that_has_not_begun_is_made_as_ever(actors: Actors) -> None:
    begin(config())
    server = Servers(actors).options(name="vllm_server_reward_0_0").remote(replica_rank=0)
    assert (server.given, server.told) == ({"replica_rank": 0}, {})


def test_a_server_of_another_run_does_not_become_one_of_this_run(actors: Actors) -> None:
    begin(config())
    actors.made["vllm_server_0_0"]._actor_id.job_id = ray.JobID.from_int(2)
    assert Servers(actors).options(name="vllm_server_0_0").remote(replica_rank=0).told == {}


def test_a_run_goes_on_where_no_server_can_begin(
    actors: Actors, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: 1 / 0)
    assert begin(config()) == []
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.rollout.name=transformers",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.disaggregation.enabled=true",
        "trainer.nnodes=2",
        "global_profiler.tool=nsys",
        "ray_kwargs.ray_init.runtime_env.env_vars.GOLDILOCKS_PATCHES=none",
        "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=mine",
    ],
)
def test_no_server_begins_where_a_run_may_make_others(actors: Actors, override: str) -> None:
    assert begin(config("ray_kwargs.ray_init.runtime_env.env_vars.GOLDILOCKS_PATCHES=all", override)) == []
    assert actors.made == {}


def test_no_server_begins_where_verl_chooses_its_machine_or_its_class(
    actors: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{}, {}])
    assert begin(config()) == []
    monkeypatch.setattr(ray, "nodes", lambda: [{}])
    with monkeypatch.context() as patched:
        patched.setattr(light_vllm, "read", lambda: None)
        assert begin(config()) == []
    monkeypatch.setitem(RolloutReplicaRegistry._registry, "vllm", object)  # GOLDILOCKS_PATCHES=none
    assert begin(config()) == []
    assert actors.made == {}


# -- verl's sources ----------------------------------------------------------------------------------------------------


known_verl = pytest.mark.skipif(verl.__version__ != "0.9.1", reason="another verl is imported, with vLLM")


@known_verl
def test_the_replica_of_the_installed_verl_is_read_without_vllm() -> None:
    found = read()
    assert found is not None, "the source of verl's vLLMReplica is new: read it, and add its digest to READABLE"
    verls, server, light = found
    assert server is light
    assert issubclass(verls, RolloutReplica)
    assert inspect.iscoroutinefunction(verls.launch_servers)
    methods = {name for name, _ in inspect.getmembers(light, inspect.isfunction)}
    assert {"generate", "launch_server", "get_master_address", "generate_all"} <= methods
    assert "lora_as_adapter" not in methods  # a property
    assert "vllm" not in sys.modules


@known_verl
def test_what_the_servers_are_made_with_is_what_verl_makes_them_with() -> None:
    """``begin`` names its actors as verl does, by a source that ``READABLE`` knows."""
    found = read()
    assert found is not None
    names = found[0].launch_servers.__code__.co_names
    assert {"rollout_env_vars", "ray_noset_envvars", "max_concurrency", "_get_server_name_prefix"} <= set(names)


def test_verls_transport_for_ascend_is_not_imported_without_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, light_vllm.ASCEND, raising=False)
    compiler = importlib.import_module("torch._inductor.config")
    monkeypatch.setattr(compiler, "compile_threads", 7)
    leave_out_ascend()
    assert compiler.compile_threads == 1, "as vLLM sets it"
    with pytest.raises(ImportError):
        importlib.import_module(light_vllm.ASCEND)
