"""Rows older than the policy are trained against the log-probs of the policy that wrote them.

verl recomputes ``old_log_probs`` under the current policy. For a carried or resumed row the ratio of the loss
would then start at 1, as if the current policy had written it. Right before the update, the log-probs that the rollout
engine stored with the row (``rollout_log_probs``) replace the recomputed ones. Where the update's own pass gives the
log-probs of the current policy, nothing is recomputed: NaN in ``old_log_probs`` means the log-prob of that pass.

``algorithm.rollout_correction`` keeps its meaning:

- ``bypass_mode``: every row already has the engine's log-probs;
- ``rollout_is``: verl multiplies by π_old / π_rollout, so ratio and weight together are against the policy that wrote
  the row, and the recomputed log-probs stay;
- ``rollout_rs``: verl has rejected rows before, by the recomputed log-probs.

The version of a row is in its tag. A rollout that paused was written by several policies, so each of its tokens is
stale or not by the policy that wrote that token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_to_nested

from goldilocks.algorithms.behaviour import behaviour_log_probs
from goldilocks.verl.store.queue_rows import fill_log_probs, is_padding, stale_tokens, version_of

FIELDS = ["old_log_probs", "rollout_log_probs", "response_mask"]


def store_log_probs(config: DictConfig) -> None:
    """Have the rollout engine return the log-probs of what it writes."""
    with open_dict(config):
        config.actor_rollout_ref.rollout.calculate_log_probs = True


def use_behaviour_log_probs(batch: KVBatchMeta, policy: int, correction: Any, *, own: bool = False) -> dict[str, float]:
    """Write the stored log-probs of stale rows over the recomputed ones; return the metrics of what was stale.

    ``policy`` is the version that is being trained, in updates; ``correction`` is ``algorithm.rollout_correction``.
    ``own``: nothing was recomputed, and the update's own pass gives the log-probs of what is not stale.
    """
    every = [
        (key, tag, not is_padding(tag) and version_of(tag) < policy)
        for key, tag in zip(batch.keys, batch.tags, strict=True)
    ]
    if not any(older for *_, older in every):
        return {"train/stale_rows": 0}
    fields = [name for name in FIELDS if not (own and name == "old_log_probs")]  # none were computed
    of = {"partition_id": batch.partition_id, "select_fields": fields}
    chosen = every if own else [row for row in every if row[2]]
    stored = tq.kv_batch_get(keys=[key for key, *_ in chosen], **of)
    if own and "rollout_log_probs" not in stored:  # rows without them are in the batch; stale rows have them
        fill_log_probs([key for key, _, older in every if not older], math.nan)
        chosen = [row for row in every if row[2]]
        stored = tq.kv_batch_get(keys=[key for key, *_ in chosen], **of)
    keys, tags, older = map(list, zip(*chosen, strict=True))
    nested_mask = stored["response_mask"]
    rows = dict(stored.to_padded_tensor().items())
    stale = stale_tokens(tags, policy, rows["response_mask"]) & torch.tensor(older).unsqueeze(-1)
    log_probs, metrics = behaviour_log_probs(rows, stale, correction)
    against = TensorDict({"old_log_probs": response_to_nested(log_probs, nested_mask)}, len(keys))
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=against)
    return metrics
