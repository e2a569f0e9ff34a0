"""Our engine as a rollout server of verl: ``rollout.name=transformers``.

``check`` refuses a config that the server cannot serve. The driver calls it before anything is started, so importing
this module imports nothing of verl.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from goldilocks.errors import require

NAME = "transformers"

_ONE = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size")
_OFF = ("quantization", "enable_rollout_routing_replay")


def check(rollout: Any, model: Any) -> None:
    """Raise ``ValueError`` for a ``rollout`` and ``model`` config that only vLLM or SGLang can serve.

    A model is looked at where it is on this machine.
    """
    for key in _ONE:
        _require(rollout.get(key, 1) <= 1, f"rollout.{key}", rollout.get(key), "1, since a replica is one process")
    for key in _OFF:
        _require(not rollout.get(key), f"rollout.{key}", rollout.get(key), "none")
    split = bool(rollout.get("disaggregation", {}).get("enabled"))
    _require(not split, "rollout.disaggregation.enabled", split, "False")
    folder = Path(str(model.get("hf_config_path") or model.get("path"))).expanduser()
    if model.get("trust_remote_code") or not (folder / "config.json").is_file():
        return  # the servers check every model again
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from goldilocks.engine.reach import check_length

    overrides = model.get("override_config") or {}
    plain = {key: value for key, value in overrides.items() if not isinstance(value, Mapping)}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **plain)
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING  # not a model that reads pictures
    _require(known, "model.path", str(model.get("path")), f"a model of text alone, which {config.model_type} is not")
    longest = rollout.get("max_model_len")
    length = longest or rollout.get("prompt_length", 0) + rollout.get("response_length", 0)
    name = "max_model_len" if longest else "prompt_length + response_length"
    check_length(config, length, f"actor_rollout_ref.rollout.{name}")


def _require(sound: bool, key: str, value: object, accepted: str) -> None:
    require(sound, f"actor_rollout_ref.{key}", value, f"{accepted}, with rollout.name={NAME}; or use rollout.name=vllm")
