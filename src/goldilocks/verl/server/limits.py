"""What ``rollout.name=transformers`` does not do, said before anything is started.

Imports nothing of verl's: the check runs in the driver, on the config as it was composed.
"""

from __future__ import annotations

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


def _unsupported(given: str, accepted: str) -> ValueError:
    return ValueError(f"actor_rollout_ref.{given} with rollout.name={NAME}: it takes {accepted}; use rollout.name=vllm")
