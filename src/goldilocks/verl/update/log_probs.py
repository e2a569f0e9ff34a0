"""Whose log-probs an update is made with: those of its own pass, or the rollout engine's, which also show old weights.

**One pass.** With one optimizer step per batch, ``old_log_probs`` would be the log-probs of the policy that is trained,
so the pass that computes the gradient gives them too. verl computes them in a pass of their own. And a row whose
advantages are all zero adds nothing to the gradient where the loss has no KL and no entropy term: it is counted in the
loss's denominator and not computed. A rank computes a fixed number of rows at a time, so its share of a batch must be a
multiple of that number. With ``use_dynamic_bsz`` verl cuts micro-batches by their tokens, and a rank's share may be any
number of rows.

**Older rows.** verl recomputes ``old_log_probs`` under the current policy. For a carried or resumed row the ratio of
the loss would then start at 1, as if the current policy had written it. Right before the update, the log-probs that the
rollout engine stored with the row (``rollout_log_probs``) replace the recomputed ones. Where the update's own pass
gives the log-probs of the current policy, nothing is recomputed: NaN in ``old_log_probs`` means the log-prob of that
pass.

``algorithm.rollout_correction`` keeps its meaning:

- ``bypass_mode``: every row already has the engine's log-probs;
- ``rollout_is``: verl multiplies by π_old / π_rollout, so ratio and weight together are against the policy that wrote
  the row, and the recomputed log-probs stay;
- ``rollout_rs``: verl has rejected rows before, by the recomputed log-probs.

The version of a row is in its tag. A rollout that paused was written by several policies, so each of its tokens is
stale or not by the policy that wrote that token.

**Old weights.** Of rows that the newest weights wrote, the engine's and the trainer's log-probs must agree. The update
measures the gap itself where its own pass gives ``old_log_probs`` (patch ``one-pass``). Where verl computed them in a
pass of its own, some fresh rows are read from the queue. Where generation never stops, a batch may have no fresh row:
then the gap is that of rows which the newest weights have written since, for a later batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import PretrainedConfig
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.utils.torch_dtypes import FLOAT_LIST
from verl.workers.utils.padding import response_to_nested

from goldilocks.dotted_keys import value_at
from goldilocks.losses.log_probs import WeightsGuard, behaviour_log_probs, gap_sums, has_experts, is_bypassed, mean_gap
from goldilocks.verl.patch import DISTANCE, MOVED_SUM, MOVED_TOKENS, WHOLE_ROWS, WHOLE_TOKENS
from goldilocks.verl.store import copied, fill_log_probs, is_padding, newest_version_of, stale_tokens, version_of

FIELDS = ["old_log_probs", "rollout_log_probs", "response_mask"]
ROWS = 64  # that the gap is measured on: the mean over their tokens tells one policy from another
# Losses that are a sum over rows, each proportional to its advantages.
BY_ROW = ("vanilla", "gspo")
DISTANCES = tuple(f"{DISTANCE}_{part}" for part in ("valid", "mean", "max"))
PRECISIONS = ("rollout.dtype", "actor.fsdp_config.mixed_precision.param_dtype")


# -- one pass ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnePass:
    """Which passes and rows a config lets an update leave out."""

    own_log_probs: bool
    rows_with_signal: bool

    @classmethod
    def of(cls, config: DictConfig, *, mini_batches: int, gate: bool, patched: bool) -> OnePass:
        """``mini_batches``: optimizer steps per batch and epoch; ``gate``: whether a gate reads ``old_log_probs``.

        ``patched``: whether the patch ``one-pass`` is in force.
        """
        if not patched:
            return cls(False, False)
        actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
        correction = algorithm.get("rollout_correction") or {}
        corrected = any(correction.get(key) for key in ("rollout_is", "rollout_rs", "bypass_mode"))
        distilled = OmegaConf.select(config, "distillation.enabled", default=False)
        one_update = mini_batches == 1 and actor.ppo_epochs == 1 and not distilled
        records = value_at(actor, f"{actor.strategy}.router_replay.mode") == "R2"  # that pass has the experts to replay
        own = one_update and not gate and not algorithm.use_kl_in_reward and not corrected and not records
        # The loss's denominator is that of the whole batch, and not the width of a micro-batch.
        whole = actor.loss_agg_mode != "seq-mean-token-sum-norm" or actor.loss_scale_factor is not None
        by_row = actor.policy_loss.get("loss_mode", "vanilla") in BY_ROW and whole
        only_advantages = not actor.use_kl_loss and not actor.entropy_coeff and not actor.calculate_entropy
        return cls(own, one_update and not corrected and by_row and only_advantages)

    def metrics(self, part: KVBatchMeta, found: dict[str, Any]) -> dict[str, float]:
        """Return the number of rows computed, and the update's distances under the names of verl's separate pass."""
        apart = {name: found.pop(f"actor/{name}") for name in DISTANCES if f"actor/{name}" in found}
        moved = taken_mean(found, MOVED_SUM, MOVED_TOKENS)
        return {
            **({"train/rows_computed": len(part)} if self.rows_with_signal else {}),
            **({} if moved is None or not self.own_log_probs else {"train/stale_log_prob_diff_mean": moved}),
            **{f"training/{name}": value for name, value in apart.items()},
        }

    def rows(self, batch: KVBatchMeta, ranks: int, micro_batch: int = 1) -> KVBatchMeta:
        """The rows that the update computes, in whole micro-batches per rank, with the size of the whole batch."""
        if not (self.own_log_probs or self.rows_with_signal):
            return batch
        fields = ["advantages", "response_mask"]
        stored = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        keys = batch.keys
        if self.rows_with_signal:
            advantages = stored["advantages"]
            active = stored["response_mask"].values().bool() & (advantages.values() != 0)
            before = torch.cat([torch.zeros(1, dtype=torch.long), active.cumsum(0)])[advantages.offsets()]
            places = chosen((before.diff() > 0).tolist(), ranks * micro_batch)
            keys = balanced([batch.keys[place] for place in places], batch, ranks)
        part = batch.select_keys(keys)
        part.extra_info[WHOLE_ROWS] = len(batch)
        part.extra_info[WHOLE_TOKENS] = int(stored["response_mask"].values().sum())
        return part


def taken_mean(found: dict[str, Any], total: str, tokens: str) -> float | None:
    """Take a sum and its count out of the update's metrics, and return their quotient; None if nothing was measured.

    Both are means over the same micro-batches and ranks.
    """
    return mean_gap([found.pop(f"actor/{name}", 0.0) for name in (total, tokens)])


def chosen(signal: list[bool], multiple: int) -> list[int]:
    """The places of rows with signal, and of as many others as make their number a multiple, at least one multiple.

    Without any row there would be no update, and the optimizer's momentum would not move.
    """
    with_signal = [place for place, has in enumerate(signal) if has]
    others = (place for place, has in enumerate(signal) if not has)
    missing = -len(with_signal) % multiple if with_signal else multiple
    return sorted(with_signal + [next(others) for _ in range(missing)])


def balanced(keys: list[str], batch: KVBatchMeta, ranks: int) -> list[str]:
    """Order the rows so that ranks get equally many, with about the same work."""
    if ranks == 1:
        return keys
    length = {key: tag["seq_len"] for key, tag in zip(batch.keys, batch.tags, strict=True)}
    work = calculate_workload(torch.tensor([length[key] for key in keys]))
    parts = get_seqlen_balanced_partitions(work.tolist(), k_partitions=ranks, equal_size=True)
    return [keys[place] for part in parts for place in part]


def update_micro_batch(config: DictConfig) -> int:
    """Return how many rows a rank computes at a time in an update."""
    actor = config.actor_rollout_ref.actor
    return _rows(actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu)


def log_prob_micro_batch(config: DictConfig) -> int:
    """Return the same of the pass over the actor; verl wants it cut like the update, by tokens or by rows."""
    parts = config.actor_rollout_ref
    return _rows(parts.actor.use_dynamic_bsz, parts.rollout.log_prob_micro_batch_size_per_gpu)


def reference_micro_batch(config: DictConfig) -> int:
    ref = config.actor_rollout_ref.ref
    return _rows(ref.log_prob_use_dynamic_bsz, ref.log_prob_micro_batch_size_per_gpu)


def _rows(dynamic: bool, size: int | None) -> int:
    return 1 if dynamic else size or 1  # None: the model is not built, or verl refuses the config itself


# -- older rows --------------------------------------------------------------------------------------------------------


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
    rows = dict(stored.to_padded_tensor().items())
    stale = stale_tokens(tags, policy, rows["response_mask"]) & torch.tensor(older).unsqueeze(-1)
    log_probs, metrics = behaviour_log_probs(rows, stale, correction)
    against = TensorDict({"old_log_probs": response_to_nested(log_probs, stored["response_mask"])}, len(keys))
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=against)
    return metrics


# -- old weights -------------------------------------------------------------------------------------------------------


def weights_guard(config: DictConfig, action: str) -> WeightsGuard:
    """Return the guard of a run; ``action`` is ``goldilocks.on_stale_weights``.

    The gap is not judged where the two sides differ by design. The engine's log-probs are those of the distribution
    that it samples from, which top-k and top-p cut; with ``logprobs_mode=raw_logprobs`` they are without the
    temperature, by which the trainer divides. Quantized weights are other weights, and experts that each side chooses
    for itself are other layers. In bypass mode the trainer has none of its own.
    """
    rollout = config.actor_rollout_ref.rollout
    exact = all(value_at(config, f"actor_rollout_ref.{key}") in FLOAT_LIST for key in PRECISIONS)
    whole = rollout.get("top_p", 1.0) >= 1 and rollout.get("top_k", -1) <= 0
    scaled = rollout.get("logprobs_mode") != "raw_logprobs" or rollout.get("temperature", 1.0) == 1
    same = not rollout.get("quantization") and (rollout.get("enable_rollout_routing_replay") or not _is_routed(config))
    apart = not is_bypassed(value_at(config, "algorithm.rollout_correction"))
    known = rollout.get("calculate_log_probs", True) and apart
    return WeightsGuard(action, exact=exact, judges=bool(whole and scaled and same and known))


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
    keys = _fresh(batch, policy, version_of) or _fresh(batch, policy, newest_version_of)
    if not keys or is_bypassed(correction):  # bypassed: the trainer takes the engine's log-probs for its own
        return None
    part = batch.select_keys(_spread(keys, ROWS))
    rows = tq.kv_batch_get(keys=part.keys, partition_id=batch.partition_id, select_fields=FIELDS).to_padded_tensor()
    if not set(FIELDS) <= set(rows.keys()):
        return None
    old, sampled, mask = (rows[name] for name in FIELDS)
    return mean_gap(gap_sums(old, sampled, mask.bool() & ~stale_tokens(part.tags, policy, mask)).tolist())


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
    """Return the mean gap of rows that are trained later; None where none is fresh.

    ``log_probs`` computes the trainer's log-probs of a ``multiple`` of rows. It is given copies of the ``fields`` it
    needs: a row with more fields than others cannot be in a batch with them.
    """
    keys = _fresh(waiting, policy, version_of)
    most = min(len(keys), max(ROWS, multiple)) // multiple * multiple
    if not most:
        return None
    rows = waiting.select_keys(_spread(keys, most))
    with copied(rows, fields(rows)) as copies:
        log_probs(copies)
        return gap_of_rows(copies, policy, None)


def _fresh(batch: KVBatchMeta, policy: int, version: Callable[[dict[str, Any]], int]) -> list[str]:
    """The keys of the rows, padding left out, whose version is this policy's."""
    pairs = zip(batch.keys, batch.tags, strict=True)
    return [key for key, tag in pairs if not is_padding(tag) and version(tag) >= policy]


def _spread(keys: list[str], most: int) -> list[str]:
    """At most so many of the keys, evenly spread."""
    count = min(len(keys), most)
    return [keys[place * len(keys) // count] for place in range(count)]
