"""What the engines of device ``cpu`` choose for verl: settings by the model's size, and one call for all parameters."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from verl.workers.config.engine import FSDPEngineConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer

from goldilocks.engine.cpu import SMALL
from goldilocks.engine.cpu.fsdp import HostEngine, LanguageModelOnHost


def built(**settings: Any) -> torch.optim.Optimizer:
    engine = LanguageModelOnHost.__new__(LanguageModelOnHost)
    engine.optimizer_config = config = FSDPOptimizerConfig(lr=0.01, **settings)
    optimizer = engine._build_optimizer(torch.nn.Linear(3, 2))
    assert engine.optimizer_config is config
    return optimizer


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_is_fused_and_keeps_what_was_chosen(name: str) -> None:
    optimizer = built(optimizer=name, override_optimizer_config={"eps": 1e-3})
    assert type(optimizer).__name__ == name
    assert (optimizer.defaults["fused"], optimizer.defaults["eps"]) == (True, 1e-3)


def test_what_excludes_it_was_chosen_or_does_not_take_it_stays_as_it_is() -> None:
    assert built(override_optimizer_config={"fused": False}).defaults["fused"] is False
    assert built(override_optimizer_config={"foreach": True}).defaults["fused"] is None
    assert built(override_optimizer_config={"differentiable": True}).defaults["fused"] is None
    assert type(built(optimizer="NAdam")) is torch.optim.NAdam


def test_a_fused_update_is_the_plain_one() -> None:
    torch.manual_seed(0)
    models = [torch.nn.Linear(5, 4), torch.nn.Linear(5, 4)]
    models[1].load_state_dict(models[0].state_dict())
    config = FSDPOptimizerConfig(lr=0.01)
    engine = LanguageModelOnHost.__new__(LanguageModelOnHost)
    engine.optimizer_config = config
    optimizers = [build_optimizer(models[0].parameters(), config), engine._build_optimizer(models[1])]
    for _ in range(3):
        rows = torch.randn(7, 5)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(rows).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())


class Verl:
    """What verl's engine does with a model, as far as torch's settings are concerned."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def forward_backward_batch(self, data: None, loss_function: None, forward_only: bool = False) -> tuple[int, bool]:
        return torch.get_num_threads(), torch.backends.mkldnn.enabled


class Engine(HostEngine, Verl):
    def __init__(self, module: torch.nn.Module) -> None:
        self.engine_config = FSDPEngineConfig()
        self._build_fsdp_module(module)


def test_a_small_actor_and_a_large_critic_of_one_process_have_each_its_own_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    torch.backends.mkldnn.enabled = True
    with torch.device("meta"):
        actor, critic = Engine(torch.nn.Linear(3, 3)), Engine(torch.nn.Linear(SMALL // 10, 10))
    used = [engine.forward_backward_batch(None, None) for engine in (actor, critic, actor)]
    assert used == [(1, False), (3, True), (1, False)]
