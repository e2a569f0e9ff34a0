"""What verl cannot do without a GPU and flash-attn, or beside a TRL that is newer than it."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

from goldilocks.verl.patches.patch import Function


def gloo_group_on_cpu(original: Function) -> Function:
    """Ask torch for one backend on the CPU: verl asks for ``cpu:gloo,cpu:gloo``, which torch rejects."""

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        from verl.utils.device import get_device_name

        if backend is None and get_device_name() == "cpu":
            backend = "cpu:gloo"
        original(timeout_second=timeout_second, backend=backend)

    return initialize_global_process_group_ray


def value_model_by_config(original: Function) -> Function:
    """Load a critic with the attention that its config names: verl loads every one with flash_attention_2."""

    @functools.wraps(original)
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        attention = model_config._attn_implementation
        if attention == "flash_attention_2":
            return original(local_path, torch_dtype, model_config, trust_remote_code)
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )

    return load_valuehead_model


def trl_with_value_heads(original: Function) -> Function:
    """Find a TRL available only where it has the value-head model that verl imports from it."""

    @functools.wraps(original)
    def is_trl_available() -> bool:
        if not original():
            return False
        folders = importlib.util.find_spec("trl").submodule_search_locations or ()  # type: ignore[union-attr]
        return any(Path(folder, "experimental", "ppo").is_dir() for folder in folders)

    return is_trl_available
