"""verl's FSDP2 engines on device ``cpu``: actor, reference policy and critic, unchanged but for where memory lies.

verl offloads a forward-only model (the reference policy) to the host through pinned memory. On the CPU its parameters
are on the host already, and there is no accelerator to pin them for: here nothing is ever offloaded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead


class _OnHost:
    """Builds the FSDP2 module with offloading switched off, for this engine's config of it only."""

    engine_config: Any

    def _build_fsdp_module(self, module: Any) -> Any:
        config = self.engine_config
        self.engine_config = dataclasses.replace(config, forward_only=False, offload_policy=False)
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = config


class LanguageModelOnHost(_OnHost, FSDPEngineWithLMHead):
    """Actor and reference policy."""


class ValueModelOnHost(_OnHost, FSDPEngineWithValueHead):
    """Critic."""


def register() -> None:
    """Make both known to verl as the engines of backend ``fsdp2`` on device ``cpu``."""
    EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(LanguageModelOnHost)
    EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")(ValueModelOnHost)
