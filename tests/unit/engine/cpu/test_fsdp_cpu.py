"""How many threads the engines of device ``cpu`` compute with."""

from __future__ import annotations

import os

import pytest
import torch
from verl.workers.config.engine import FSDPEngineConfig

from goldilocks.engine.cpu import SMALL
from goldilocks.engine.cpu.fsdp import HostEngine


class Verl:
    """What verl's engine does with a model, as far as torch's threads are concerned."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def forward_backward_batch(self, data: None, loss_function: None, forward_only: bool = False) -> int:
        return torch.get_num_threads()


class Engine(HostEngine, Verl):
    def __init__(self, module: torch.nn.Module) -> None:
        self.engine_config = FSDPEngineConfig()
        self._build_fsdp_module(module)


def test_a_small_actor_and_a_large_critic_of_one_process_have_each_its_own_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "1")
    with torch.device("meta"):
        actor, critic = Engine(torch.nn.Linear(3, 3)), Engine(torch.nn.Linear(SMALL // 10, 10))
    used = [engine.forward_backward_batch(None, None) for engine in (actor, critic, actor)]
    assert used == [1, 3, 1]
