"""Rows older than the policy are trained against the log-probs of the policy that wrote them.

verl recomputes ``old_log_probs`` under the current policy. For a carried or resumed row the ratio of the loss
would then start at 1, as if the current policy had written it. Right before the update, the log-probs that the rollout
engine stored with the row (``rollout_log_probs``) replace the recomputed ones. Where the update's own pass gives the
log-probs of the current policy, nothing is recomputed: its tokens are NaN.

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

from goldilocks.algorithms.behaviour import behaviour_log_probs
from goldilocks.verl.store.padding import nested_as
from goldilocks.verl.store.rows import fill_log_probs

VERSIONS = "versions"  # in the tag of a row by several policies: [version, how many tokens it wrote], in order
FIELDS = ["old_log_probs", "rollout_log_probs", "response_mask"]


def store_log_probs(config: DictConfig) -> None:
    """Have the rollout engine return the log-probs of what it writes."""
    with open_dict(config):
        config.actor_rollout_ref.rollout.calculate_log_probs = True


def version_of(tag: dict[str, Any]) -> int:
    """The policy that wrote a row, in updates; of a row by several policies, the oldest.

    Without a version from the rollout server, it is the policy of the step that asked for the rollout.
    """
    version = tag.get("min_global_steps")
    return int(tag["global_steps"]) - 1 if version is None else int(version)


def newest_version_of(tag: dict[str, Any]) -> int:
    """The newest of the policies that wrote a row."""
    spans = tag.get(VERSIONS)
    return int(spans[-1][0]) if spans else version_of(tag)


def stale_rows(batch: KVBatchMeta, policy: int) -> list[bool]:
    """Whether each row is older than the policy; padding is not."""
    return [not tag.get("is_padding", False) and version_of(tag) < policy for tag in batch.tags]


def stale_tokens(tags: list[dict[str, Any]], policy: int, response_mask: torch.Tensor) -> torch.Tensor:
    """Whether each token [rows, tokens] was written by an older policy; tokens that no policy wrote were not."""
    stale = torch.tensor([version_of(tag) < policy for tag in tags]).unsqueeze(-1) & response_mask.bool()
    for row, tag in enumerate(tags):
        if spans := tag.get(VERSIONS):
            ages = [version < policy for version, count in spans for _ in range(count)]
            written = response_mask[row].nonzero().squeeze(-1)[: len(ages)]
            stale[row, written] = torch.tensor(ages[: len(written)], dtype=torch.bool)  # padding has none
    return stale


def use_behaviour_log_probs(batch: KVBatchMeta, policy: int, correction: Any, *, own: bool = False) -> dict[str, float]:
    """Write the stored log-probs of stale rows over the recomputed ones; return the metrics of what was stale.

    ``policy`` is the version that is being trained, in updates; ``correction`` is ``algorithm.rollout_correction``.
    ``own``: nothing was recomputed, and the update's own pass gives the log-probs of what is not stale.
    """
    older = stale_rows(batch, policy)
    if not any(older):
        return {"train/stale_rows": 0}
    every = list(zip(batch.keys, batch.tags, older, strict=True))
    fields = [name for name in FIELDS if not (own and name == "old_log_probs")]  # none were computed
    of = {"partition_id": batch.partition_id, "select_fields": fields}
    found = [row for row in every if row[2] or own]
    stored = tq.kv_batch_get(keys=[key for key, *_ in found], **of)
    if own and "rollout_log_probs" not in stored:  # not every row has them
        fill_log_probs([key for key, _, old in every if not old], math.nan)
        found = [row for row in every if row[2]]
        stored = tq.kv_batch_get(keys=[key for key, *_ in found], **of)
    keys, tags, older = map(list, zip(*found, strict=True))
    nested_mask = stored["response_mask"]
    rows = dict(stored.to_padded_tensor().items())
    stale = stale_tokens(tags, policy, rows["response_mask"]) & torch.tensor(older).unsqueeze(-1)
    log_probs, metrics = behaviour_log_probs(rows, stale, correction)
    against = TensorDict({"old_log_probs": nested_as(log_probs, nested_mask)}, len(keys))
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=against)
    return metrics
