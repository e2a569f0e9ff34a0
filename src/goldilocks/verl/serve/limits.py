"""What ``rollout.name=transformers`` does not do, said before anything is started.

Imports nothing of verl's: the check runs in the driver, on the config as it was composed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "transformers"

_ONE = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size")
_OFF = ("quantization", "enable_rollout_routing_replay")


def check(rollout: Any, model: Any) -> None:
    """Raise ``ValueError`` for a ``rollout`` and ``model`` config that only vLLM or SGLang can serve."""
    for key in _ONE:
        if rollout.get(key, 1) > 1:
            raise _unsupported(f"rollout.{key}={rollout.get(key)}", "1: a replica is one process on one device")
    for key in _OFF:
        if rollout.get(key):
            raise _unsupported(f"rollout.{key}={rollout.get(key)!r}", "it off")
    if rollout.get("disaggregation", {}).get("enabled"):
        raise _unsupported("rollout.disaggregation.enabled=True", "False")
    if model.get("lora_rank", 0) > 0 and not model.get("lora", {}).get("merge"):
        raise _unsupported(
            f"model.lora_rank={model.get('lora_rank')} with model.lora.merge=False", "model.lora.merge=True"
        )
    _check_length(rollout, model)


def _check_length(rollout: Any, model: Any) -> None:
    """Refuse texts longer than the model's plain attention reaches.

    This reads a config that lies on this machine and needs no code of its own. The servers ask again, of any model.
    """
    folder = Path(str(model.get("hf_config_path") or model.get("path"))).expanduser()
    if model.get("trust_remote_code") or not (folder / "config.json").is_file():
        return
    from transformers import AutoConfig

    from goldilocks.engine.reach import check_length

    overrides = model.get("override_config") or {}
    plain = {key: value for key, value in overrides.items() if not isinstance(value, Mapping)}
    longest = rollout.get("max_model_len")
    length = longest or rollout.get("prompt_length", 0) + rollout.get("response_length", 0)
    name = "max_model_len" if longest else "prompt_length + response_length"
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **plain)
    check_length(config, length, f"actor_rollout_ref.rollout.{name}")


def _unsupported(given: str, accepted: str) -> ValueError:
    return ValueError(f"actor_rollout_ref.{given} with rollout.name={NAME}: it takes {accepted}; use rollout.name=vllm")
