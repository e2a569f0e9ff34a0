"""vLLM's cache of compiled graphs: one run at a time, and none that may be damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from goldilocks.launch.driver import DISABLED, ROOT, compile_cache, compiles_once
from goldilocks.runs.files import RunDir


def settings(**changes: object) -> DictConfig:
    config = OmegaConf.create(
        {
            "trainer": {"device": "cuda", "nnodes": 1, "n_gpus_per_node": 2},
            "ray_kwargs": {"ray_init": {"address": "local"}},
            "reward": {"reward_model": {"enable": False}},
            "distillation": {"enabled": False},
            "actor_rollout_ref": {
                "model": {"path": "org/model"},
                "rollout": {
                    "name": "vllm",
                    "enforce_eager": False,
                    "nnodes": 0,
                    "tensor_model_parallel_size": 2,
                    "pipeline_model_parallel_size": 1,
                    "data_parallel_size": 1,
                },
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    return config


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A vLLM to ask for its version, and an empty cache of this test's own."""
    monkeypatch.setattr(metadata, "version", {"vllm": "0.20.2"}.__getitem__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (DISABLED, ROOT):  # so that both are as before after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def used(run: Path, graph: str, *, logs: bool = True, **changes: object) -> set[str] | None:
    """Have a run compile a graph; return all that it has in the cache then, None for a run without a cache."""
    os.environ.pop(DISABLED, None)
    os.environ.pop(ROOT, None)
    with compile_cache(settings(**changes), run):
        if logs:
            RunDir(run).metrics.write_text("{}\n")
        if ROOT not in os.environ:
            assert DISABLED not in os.environ
            return None
        assert os.environ[DISABLED] == "0"
        folder = Path(os.environ[ROOT])
        (folder / f"graph {graph}").touch()
        return {file.name.split()[1] for file in folder.glob("graph *")}


def test_a_run_finds_what_the_last_one_compiled_for_the_same_model(tmp_path: Path) -> None:
    assert used(RunDir.create(tmp_path, "first").path, "a") == {"a"}
    assert used(RunDir.create(tmp_path, "second").path, "b") == {"a", "b"}
    assert used(RunDir.create(tmp_path, "third").path, "c", actor_rollout_ref__model__path="org/other") == {"c"}


def test_what_a_run_left_that_came_to_no_step_is_thrown_away(tmp_path: Path) -> None:
    run = partial(RunDir.create, tmp_path, "run")  # every start of the run sets its earlier metrics aside
    assert used(run().path, "a") == {"a"}
    assert used(run().path, "b", logs=False) == {"a", "b"}
    assert used(run().path, "c", logs=False) == {"c"}
    assert used(run().path, "d") == {"d"}
    assert used(run().path, "e") == {"d", "e"}


def test_a_start_that_does_not_use_the_cache_does_not_vouch_for_what_the_one_before_left(tmp_path: Path) -> None:
    run = partial(RunDir.create, tmp_path, "run")
    assert used(run().path, "a") == {"a"}
    assert used(run().path, "b", logs=False) == {"a", "b"}
    assert used(run().path, "none", actor_rollout_ref__rollout__enforce_eager=True) is None
    assert used(run().path, "c") == {"c"}


def test_a_second_run_at_the_same_time_compiles_anew(tmp_path: Path) -> None:
    holder = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_compile_cache as here
here.metadata.version = {"vllm": "0.20.2"}.__getitem__
with here.compile_cache(here.settings(), Path(sys.argv[2])):
    print(here.os.environ[here.ROOT], flush=True)
    sys.stdin.read()
"""
    words = [sys.executable, "-c", holder, str(Path(__file__).parent), str(tmp_path / "other")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline().startswith(str(tmp_path))
        assert used(tmp_path, "a") is None
        other.kill()
    assert used(tmp_path, "a") == {"a"}


def test_a_cache_that_cannot_be_written_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert used(tmp_path, "a") is None


def test_a_ray_of_others_is_left_as_verl_has_it(tmp_path: Path) -> None:
    assert used(tmp_path, "a", ray_kwargs__ray_init__address="auto") is None


def test_without_vllm_there_is_nothing_to_say_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert used(tmp_path, "a") is None


@pytest.mark.parametrize("name", [DISABLED, ROOT])
def test_who_sets_vllms_variables_has_them_as_they_are(name: str, tmp_path: Path) -> None:
    os.environ[name] = "1"
    with compile_cache(settings(), tmp_path):
        assert {key: os.environ.get(key) for key in (DISABLED, ROOT)} == {DISABLED: None, ROOT: None, name: "1"}


@pytest.mark.parametrize(
    "change",
    [
        {"actor_rollout_ref__rollout__name": "transformers"},
        {"trainer__device": "cpu"},
        {"actor_rollout_ref__rollout__enforce_eager": True},
        {"actor_rollout_ref__rollout__tensor_model_parallel_size": 1},
        {"actor_rollout_ref__rollout__nnodes": 1},
        {"actor_rollout_ref__rollout__data_parallel_size": 2},
        {"reward__reward_model__enable": True},
        {"distillation__enabled": True},
    ],
)
def test_only_a_run_with_one_engine_that_compiles_uses_it(change: dict[str, object]) -> None:
    assert compiles_once(settings())
    assert not compiles_once(settings(**change))
