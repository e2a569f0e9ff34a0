"""verl's FSDP2 engines on device ``cpu``, for actor, reference policy and critic, without offloading.

verl offloads a forward-only model (the reference policy) to the host through pinned memory. On the CPU it is there.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from goldilocks.platforms import threads_per_rank


class HostEngine:
    """Takes its share of the cores, and builds the FSDP2 module without offloading."""

    engine_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.set_num_threads(threads_per_rank(int(os.environ.get("RAY_LOCAL_WORLD_SIZE", "1"))))

    def _build_fsdp_module(self, module: Any) -> Any:
        config = self.engine_config
        self.engine_config = dataclasses.replace(config, forward_only=False, offload_policy=False)
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = config


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class LanguageModelOnHost(HostEngine, FSDPEngineWithLMHead):
    """Actor and reference policy."""


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")
class ValueModelOnHost(HostEngine, FSDPEngineWithValueHead):
    """Critic."""
