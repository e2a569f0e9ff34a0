"""Rows of the TransferQueue: which a batch has, and what is done to them where they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.transferqueue_utils import kv_batch_meta2batch_meta
from verl.workers.utils.padding import response_to_nested

from goldilocks.algorithms import weigh_prompts_equally
from goldilocks.types import Group, Rollout
from goldilocks.verl.v1.fields import PARTITION


def batch_of(groups: Iterable[Group]) -> KVBatchMeta:
    """The rows that are trained, group by group; of groups that were not taken yet, all."""
    pairs = [pair for group in groups for rollout in group.trained or group.rollouts for pair in rollout.payload]
    return KVBatchMeta(partition_id=PARTITION, keys=[key for key, _ in pairs], tags=[dict(tag) for _, tag in pairs])


def keys_of(rollouts: Iterable[Rollout]) -> list[str]:
    """Where the rollouts' tensors are."""
    return [key for rollout in rollouts for key, _ in rollout.payload]


def padding_keys(batch: KVBatchMeta) -> list[str]:
    """The rows that verl added so that the workers can divide the batch."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding", False)]


# What a worker said of whole sequences; the part that is trained on has been put under another name, or in the metrics.
USED_UP = ("log_probs", "entropy")


def tensor_fields(batch: KVBatchMeta, also: Iterable[str] = ()) -> list[str]:
    """The fields that are tensors, and those named; the rows of a batch have had the same done to them."""
    first = KVBatchMeta(partition_id=batch.partition_id, keys=batch.keys[:1], tags=batch.tags[:1])
    schema = kv_batch_meta2batch_meta(first).field_schema
    tensors = [name for name, about in schema.items() if not about["is_non_tensor"] or name in also]
    return [name for name in tensors if name not in USED_UP]


def zero_log_probs(keys: list[str], *, ref: bool) -> None:
    """Rows added after log-probs were computed have a mask of zero: any value will do, but there must be one."""
    if not keys:
        return
    mask = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["response_mask"])["response_mask"]
    zeros = torch.zeros_like(mask, dtype=torch.float32)
    names = ["old_log_probs", "entropy", *(["ref_log_prob"] if ref else [])]
    fields = TensorDict(dict.fromkeys(names, zeros), batch_size=len(keys))
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields)


def weigh_advantages(batch: KVBatchMeta, loss_agg_mode: str) -> None:
    """Each prompt weighs the same, however many rollouts it has."""
    fields = ["advantages", "response_mask", "uid"]
    stored = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=fields)
    uids = stored.pop("uid").tolist()
    nested_mask = stored["response_mask"]
    padded = stored.to_padded_tensor()
    weighed = weigh_prompts_equally(padded["advantages"], padded["response_mask"], uids, loss_agg_mode)
    advantages = TensorDict({"advantages": response_to_nested(weighed, nested_mask)}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=advantages)


def clear(keys: Iterable[str]) -> None:
    """Free these rows."""
    gone = list(keys)
    if gone:
        tq.kv_clear(keys=gone, partition_id=PARTITION)
