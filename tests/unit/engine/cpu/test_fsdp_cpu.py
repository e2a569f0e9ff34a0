"""How many threads the engines of device ``cpu`` compute with."""

from __future__ import annotations

import os

import pytest
import torch
from verl.workers.config.engine import FSDPEngineConfig

from goldilocks.engine.cpu import SMALL
from goldilocks.engine.cpu.fsdp import HostEngine


class Verl:
    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module


class Engine(HostEngine, Verl):
    def __init__(self, module: torch.nn.Module) -> None:
        self.engine_config = FSDPEngineConfig()
        self._build_fsdp_module(module)


def test_a_large_model_is_computed_with_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "1")
    for size, threads in ((3, 1), (SMALL // 10, 3)):
        with torch.device("meta"):
            Engine(torch.nn.Linear(size, 10))
        assert torch.get_num_threads() == threads
