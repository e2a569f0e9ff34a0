"""verl's FSDP2 engines on device ``cpu``, for actor, reference policy and critic, without offloading.

verl offloads a forward-only model (the reference policy) to the host through pinned memory. On the CPU it is there.
verl rounds weights that it merges with an adapter (``model.lora.merge``) to bf16. On the CPU training is in fp32, so
the rollout server would sample from another policy than the one that is trained; here the weights keep their precision.
torch's Adam updates all parameters in one call: of FSDP2's parameters each would be a dozen calls of its own.
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

from goldilocks.engine.cpu import HostSettings

IN_ONE_CALL = ("Adam", "AdamW")  # torch's optimizers that take ``fused``
OTHERWISE = {"foreach", "differentiable"}  # their settings that exclude it


class HostEngine:
    """Takes its share of the cores, and builds the FSDP2 module without offloading."""

    engine_config: Any
    optimizer_config: Any
    module: Any
    _settings: HostSettings

    def _build_fsdp_module(self, module: Any) -> Any:
        self._settings = HostSettings.of(module, int(os.environ.get("RAY_LOCAL_WORLD_SIZE", "1")))
        config = self.engine_config
        self.engine_config = dataclasses.replace(config, forward_only=False, offload_policy=False)
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = config

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
        """With its own settings: a process may have an actor and a critic, of different sizes."""
        with self._settings.applied():
            return super().forward_backward_batch(*args, **kwargs)  # type: ignore[misc]

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        """As verl's. A single rank has its weights whole: to have FSDP2 gather them takes as long as a message."""
        if torch.distributed.get_world_size() > 1:
            return super().get_per_tensor_param(*args, **kwargs)  # type: ignore[misc]
        hook = self.module.register_state_dict_post_hook(_whole_weights)
        try:
            return super().get_per_tensor_param(*args, **kwargs)  # type: ignore[misc]
        finally:
            hook.remove()

    def _build_optimizer(self, module: Any) -> Any:
        config = self.optimizer_config
        self.optimizer_config = dataclasses.replace(config, override_optimizer_config=in_one_call(config))
        try:
            return super()._build_optimizer(module)  # type: ignore[misc]
        finally:
            self.optimizer_config = config

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base weights with the adapter merged in, as copies: at the end the module is as it was."""
        with merged_lora_context(self.module, backup_adapters=True):
            weights = convert_weight_keys(normalize_peft_param_name(self.module.state_dict()), self.module)
            for name, weight in weights.items():
                yield name, (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()


def _whole_weights(_module: Any, weights: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    for name, weight in weights.items():
        if isinstance(weight, DTensor):
            weights[name] = weight.to_local()


def in_one_call(config: Any) -> dict[str, Any] | None:
    """Return the settings of the optimizer, with ``fused`` where the optimizer takes it and nothing forbids it."""
    chosen = config.override_optimizer_config or {}
    takes_it = config.optimizer_impl == "torch.optim" and config.optimizer in IN_ONE_CALL
    return {"fused": True, **chosen} if takes_it and not OTHERWISE & chosen.keys() else chosen or None


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class LanguageModelOnHost(HostEngine, FSDPEngineWithLMHead):
    """Actor and reference policy."""


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")
class ValueModelOnHost(HostEngine, FSDPEngineWithValueHead):
    """Critic."""
