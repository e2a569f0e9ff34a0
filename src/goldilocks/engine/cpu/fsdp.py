"""verl's FSDP2 engines on device ``cpu``, for actor, reference policy and critic, without offloading.

verl offloads a forward-only model (the reference policy) to the host through pinned memory. On the CPU it is there.
verl rounds weights that it merges with an adapter (``model.lora.merge``) to bf16. On the CPU training is in fp32, so
the rollout server would sample from another policy than the one that is trained; here the weights keep their precision.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name
from verl.utils.model import convert_weight_keys
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from goldilocks.engine.cpu import threads_for


class HostEngine:
    """Takes its share of the cores, and builds the FSDP2 module without offloading."""

    engine_config: Any
    module: Any

    def _build_fsdp_module(self, module: Any) -> Any:
        torch.set_num_threads(threads_for(module, int(os.environ.get("RAY_LOCAL_WORLD_SIZE", "1"))))
        config = self.engine_config
        self.engine_config = dataclasses.replace(config, forward_only=False, offload_policy=False)
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = config

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base weights with the adapter merged in, as copies: at the end the module is as it was."""
        with merged_lora_context(self.module, backup_adapters=True):
            weights = convert_weight_keys(normalize_peft_param_name(self.module.state_dict()), self.module)
            for name, weight in weights.items():
                yield name, (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class LanguageModelOnHost(HostEngine, FSDPEngineWithLMHead):
    """Actor and reference policy."""


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")
class ValueModelOnHost(HostEngine, FSDPEngineWithValueHead):
    """Critic."""
