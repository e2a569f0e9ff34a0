"""What verl needs to run on a machine without a GPU, without flash-attn, or beside a TRL that is newer than it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from goldilocks.verl.patch import Function, Kind, Patch, around


@around
def gloo_group_on_cpu(original: Function, timeout_second: int | None = None, backend: str | None = None) -> None:
    """Ask torch for one backend on the CPU: verl asks for ``cpu:gloo,cpu:gloo``, which torch rejects.

    A worker that is alone listens on any free port: the one that verl chose for it was free some seconds ago.
    """
    from verl.utils.device import get_device_name

    if get_device_name() == "cpu":
        backend = backend or "cpu:gloo"
        if os.environ.get("WORLD_SIZE", "1") == "1":
            os.environ["MASTER_PORT"] = "0"
    original(timeout_second=timeout_second, backend=backend)


PROCESS_GROUP = Patch(
    name="process-group",
    kind=Kind.CPU,
    module="verl.utils.distributed",
    replaced={"initialize_global_process_group_ray": gloo_group_on_cpu},
    written_for={"initialize_global_process_group_ray": "761a94d1a2e058d3"},
    reason="verl asks torch for two backends for one device, which torch rejects, and for a port that was free before",
    changes="nothing where there is an accelerator",
    without="no worker starts",
    needless_when="verl names one backend where the accelerator is the CPU",
    platform="cpu",
)


@around
def value_model_by_config(
    original: Function, local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
) -> Any:
    """Load a critic with the attention that its config names: verl loads every one with flash_attention_2."""
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


@around
def trl_with_value_heads(original: Function) -> bool:
    """Find a TRL available only where it has the value-head model that verl imports from it."""
    if not original():
        return False
    folders = importlib.util.find_spec("trl").submodule_search_locations or ()  # type: ignore[union-attr]
    return any(Path(folder, "experimental", "ppo").is_dir() for folder in folders)


CRITIC_ATTENTION = Patch(
    name="critic-attention",
    kind=Kind.CPU,
    module="verl.utils.model",
    replaced={"load_valuehead_model": value_model_by_config},
    written_for={"load_valuehead_model": ("2371ca280654b53b", "a8eb0107bc1ae283")},
    reason="verl loads every critic with flash_attention_2, which needs a GPU and flash-attn",
    changes="a critic whose config names another attention is loaded with that one, without verl's fallbacks",
    without="no critic is loaded without flash-attn",
    needless_when="verl loads a critic with the attention of its config, as it loads an actor",
)

TRL_VALUE_HEADS = Patch(
    name="trl-value-heads",
    kind=Kind.CPU,
    module="verl.utils.import_utils",
    replaced={"is_trl_available": trl_with_value_heads},
    written_for={"is_trl_available": "1a123c4fa66c9cb9"},
    reason="verl takes any TRL for one with a value-head model; TRL removed it in 1.13, and every FSDP worker fails",
    changes="nothing but that",
    without="no FSDP worker starts beside TRL 1.13 or later",
    needless_when="verl looks for the class that it imports from TRL",
)
