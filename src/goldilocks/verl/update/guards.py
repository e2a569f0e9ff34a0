"""The guard for old weights on verl.

The update measures the gap to the rollout engine itself where it computes ``old_log_probs`` (patch ``one-pass``). Where
verl computed them in a pass of its own, some fresh rows are read from the queue. Where generation never stops a batch
may have none: then the gap is that of rows which the newest weights have written since, for a later batch.
"""

from __future__ import annotations

from collections.abc import Callable
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
from goldilocks.verl.store.queue_rows import copied, newest_version_of, stale_tokens, version_of
from goldilocks.verl.update.log_probs import FIELDS

ROWS = 64  # that are read: the mean over their tokens tells one policy from another
Tag = dict[str, Any]
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
    """Return the mean gap of fresh tokens in the queue; None where there is none, or no log-prob of either side.

    Rows that the newest policy wrote alone are read, or, where there is none, rows that it wrote the end of.
    """
    pairs = _fresh(batch, policy, version_of) or _fresh(batch, policy, newest_version_of)
    if not pairs or is_bypassed(correction):  # bypassed: the trainer takes the engine's log-probs for its own
        return None
    keys, tags = map(list, zip(*_some(pairs, ROWS), strict=True))
    rows = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=FIELDS).to_padded_tensor()
    if not set(FIELDS) <= set(rows.keys()):
        return None
    old, sampled, mask = (rows[name] for name in FIELDS)
    return mean_gap(gap_sums(old, sampled, mask.bool() & ~stale_tokens(tags, policy, mask)).tolist())


def has_fresh_token(batch: KVBatchMeta, policy: int) -> bool:
    """Whether the newest policy wrote a row of the batch, or the end of one."""
    return bool(_fresh(batch, policy, newest_version_of))


def gap_of_waiting_rows(
    waiting: KVBatchMeta,
    policy: int,
    multiple: int,
    fields: Callable[[KVBatchMeta], list[str]],
    log_probs: Callable[[KVBatchMeta], Any],
) -> float | None:
    """Return the mean gap of rows that are trained later; ``log_probs`` computes the trainer's, of a multiple of rows.

    It is given copies of the ``fields`` it needs: a row with more fields than others cannot be in a batch with them.
    """
    pairs = _fresh(waiting, policy, version_of)
    pairs = _some(pairs, min(len(pairs), max(ROWS, multiple)) // multiple * multiple)
    if not pairs:
        return None
    rows = waiting.select_keys([key for key, _ in pairs])
    with copied(rows, fields(rows)) as copies:
        log_probs(copies)
        return gap_of_rows(copies, policy, None)


def _fresh(batch: KVBatchMeta, policy: int, version: Callable[[Tag], int]) -> list[tuple[str, Tag]]:
    """The key and the tag of each row, but padding, that is by this policy."""
    pairs = zip(batch.keys, batch.tags, strict=True)
    return [(key, tag) for key, tag in pairs if not tag.get("is_padding", False) and version(tag) >= policy]


def _some(pairs: list[tuple[str, Tag]], most: int) -> list[tuple[str, Tag]]:
    """So many of them, evenly spread."""
    count = min(len(pairs), most)
    return [pairs[place * len(pairs) // count] for place in range(count)]
