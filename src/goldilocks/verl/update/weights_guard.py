"""The guard for old weights on verl: which precision explains a gap, and the gap of rows in the queue.

The update measures the gap itself where it computes ``old_log_probs`` (patch ``one-pass``). Where verl computed them in
a pass of its own, some fresh rows are read from the queue.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from transformers import PretrainedConfig
from verl.utils.torch_dtypes import FLOAT_LIST

from goldilocks.algorithms.behaviour import is_bypassed
from goldilocks.algorithms.weights_gap import WeightsGuard, gap_sums, has_experts, mean_gap
from goldilocks.dotted_keys import value_at
from goldilocks.verl.store.behaviour import FIELDS, stale_rows

ROWS = 64  # that are read: the mean over their tokens tells one policy from another
PRECISIONS = ("rollout.dtype", "actor.fsdp_config.mixed_precision.param_dtype")


def weights_guard(config: DictConfig, action: str) -> WeightsGuard:
    """Return the guard of a run; ``action`` is ``goldilocks.on_stale_weights``.

    The engine's log-probs are those of the distribution that it samples from, which top-k and top-p cut; with
    ``logprobs_mode=raw_logprobs`` they are without the temperature, by which the trainer divides. Quantized weights are
    other weights, and experts that each side chooses for itself are other layers.
    """
    rollout = config.actor_rollout_ref.rollout
    exact = all(value_at(config, f"actor_rollout_ref.{key}") in FLOAT_LIST for key in PRECISIONS)
    whole = rollout.get("top_p", 1.0) >= 1 and rollout.get("top_k", -1) <= 0
    scaled = rollout.get("logprobs_mode") != "raw_logprobs" or rollout.get("temperature", 1.0) == 1
    same = not rollout.get("quantization") and (rollout.get("enable_rollout_routing_replay") or not _is_routed(config))
    return WeightsGuard(action, exact=exact, judges=bool(whole and scaled and same))


def _is_routed(config: DictConfig) -> bool:
    """Whether the model has experts, as far as its config is on this machine."""
    model = config.actor_rollout_ref.get("model") or {}
    path = model.get("hf_config_path") or model.get("path")
    try:
        found, _ = PretrainedConfig.get_config_dict(str(Path(str(path)).expanduser()), local_files_only=True)
    except (OSError, ValueError):
        return False
    return has_experts(found)


def gap_of_rows(batch: KVBatchMeta, policy: int, correction: Any) -> float | None:
    """Return the mean gap of fresh rows in the queue; None where there is none, or no log-prob of either side."""
    stale = stale_rows(batch, policy)
    padding = [tag.get("is_padding", False) for tag in batch.tags]
    fresh = [key for key, *left_out in zip(batch.keys, stale, padding, strict=True) if not any(left_out)]
    if not fresh or is_bypassed(correction):  # bypassed: the trainer takes the engine's log-probs for its own
        return None
    keys = fresh[:: -(-len(fresh) // ROWS)]
    rows = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=FIELDS).to_padded_tensor()
    if not set(FIELDS) <= set(rows.keys()):
        return None
    old, sampled, mask = (rows[name] for name in FIELDS)
    return mean_gap(gap_sums(old, sampled, mask.bool()).tolist())
