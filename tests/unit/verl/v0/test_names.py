from __future__ import annotations

import importlib
import importlib.util
import pickle
import runpy
import sys
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

import goldilocks
from goldilocks import filtering, main_ppo
from goldilocks.core import allocators
from goldilocks.main_ppo import on_cpu, overrides
from goldilocks.verl.v0 import names

DEVICE, MODE = "+device=cpu", "trainer.v1.trainer_mode=goldilocks"


@pytest.mark.parametrize("name", names.NAMES["verl.trainer.config"])
def test_the_configs_are_found_where_the_guides_import_them_from(name: str) -> None:
    assert getattr(importlib.import_module("verl.trainer.config"), name) is getattr(goldilocks, name)


def test_what_verl_has_stays_verls() -> None:
    config = importlib.import_module("verl.trainer.config")
    assert config.AlgoConfig.__module__ == "verl.trainer.config.algorithm"
    assert importlib.import_module("verl.trainer.main_ppo").__file__ != main_ppo.__file__
    with pytest.raises(AttributeError, match=r"module 'verl.trainer.config' has no attribute 'NoSuchConfig'"):
        _ = config.NoSuchConfig
    assert importlib.util.find_spec("verl.trainer.no_such_module") is None


@pytest.mark.parametrize(
    ("module", "name", "ours"),
    [
        ("verl.trainer.ppo", "RayPPOTrainerWithSampling", goldilocks),
        ("verl.trainer.ppo.ray_trainer_with_sampling", "RayPPOTrainerWithSampling", goldilocks),
        ("verl.trainer.ppo.adaptive_ray_trainer", "RayPPOTrainerWithSampling", goldilocks),
        ("verl.trainer.ppo.adaptive_rollout", "Adaptive", allocators),
        ("verl_patch.trainer.code.filters", "PPOBatchFilter", filtering),
        ("verl_patch.trainer.code.filters", "PPOFilterConfig", filtering),
    ],
)
def test_what_the_guides_import_is_ours_under_another_name(module: str, name: str, ours: ModuleType) -> None:
    importlib.import_module("verl.trainer")
    assert getattr(importlib.import_module(module), name) is getattr(ours, name)


def test_the_adaptive_entry_point_is_a_module_of_verls() -> None:
    importlib.import_module("verl.trainer")
    spec = importlib.util.find_spec("verl.trainer.main_ppo_adaptive")
    assert spec is not None
    assert spec.origin == importlib.util.find_spec("goldilocks.main_ppo_adaptive").origin


def test_switched_off_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(names.SWITCH, "0")
    config = importlib.import_module("verl.trainer.config")
    monkeypatch.delitem(config.__dict__, "__getattr__")
    before = list(sys.meta_path)
    runpy.run_module("goldilocks.verl.v0.names")
    assert sys.meta_path == before
    assert not hasattr(config, "TrainerConfig")
    monkeypatch.setenv(names.SWITCH, "1")
    monkeypatch.setattr(sys, "meta_path", before.copy())
    runpy.run_module("goldilocks.verl.v0.names")
    assert hasattr(config, "TrainerConfig")
    assert len(sys.meta_path) == len(before) + 1


def test_a_command_line_of_verls_gets_our_trainer_and_the_cpu_and_what_the_user_says_stands() -> None:
    assert overrides(["data.train_files=a"], cpu=True) == [DEVICE, MODE, "data.train_files=a"]
    assert overrides([], cpu=False) == [MODE]
    words = ["trainer.v1.trainer_mode=sync", "+device=cuda", "+adaptive_rollout.enable=False"]
    given = [*words[:2], "++adaptive_rollout.enable=False"]
    assert overrides(words, "++adaptive_rollout.enable=True", cpu=True) == given


def test_our_sections_can_be_added_whether_or_not_they_are_there() -> None:
    given = ["+adaptive_rollout.max_n=128", "+batch_filter.strategy=uniform", "+goldilocks.selector=greso", "+task=a"]
    given += ["++adaptive_rollout.stop=contrast", "+goldilocksmith.key=1", "~goldilocks.selector"]
    assert overrides(given, cpu=False)[1:] == [
        "++adaptive_rollout.max_n=128",
        "++batch_filter.strategy=uniform",
        "++goldilocks.selector=greso",
        *given[3:],
    ]


@pytest.mark.parametrize(
    ("words", "platform", "expected"),
    [
        (["+device=cpu"], "nvidia", True),
        (["trainer.device=cuda"], "cpu", False),
        ([], "cpu", True),
        ([], "nvidia", False),
        (["data.device=cuda"], "cpu", True),
    ],
)
def test_the_device_is_the_users_choice(
    monkeypatch: pytest.MonkeyPatch, words: list[str], platform: str, expected: bool
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", platform)
    assert on_cpu(words) is expected


def test_without_a_choice_the_machine_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert on_cpu([])


def test_ray_sends_the_task_runner_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class sent by value has a copy of the name that the patch ``v0-trainer`` binds, which is verl's trainer."""
    runners: list[Any] = []
    monkeypatch.setattr("verl.trainer.main_ppo.run_ppo", lambda _, task_runner_class: runners.append(task_runner_class))
    monkeypatch.setattr("verl.utils.config.validate_config", lambda **_: None)
    monkeypatch.setattr("goldilocks.config.settings.Settings.from_config", lambda _: None)
    for check in ("verl.checks.check_entry", "verl.checks.check_run", "verl.checks.check_v0"):
        monkeypatch.setattr(f"goldilocks.{check}", lambda *_, **__: None)
    for need in ("need_critic", "need_reference_policy"):
        monkeypatch.setattr(f"verl.trainer.ppo.utils.{need}", lambda _: False)
    main_ppo.train(OmegaConf.create({"trainer": {"use_v1": False, "device": "cpu"}}))
    sent = runners[0].__ray_metadata__.modified_class
    assert pickle.loads(pickle.dumps(sent)) is sent
