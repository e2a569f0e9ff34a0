"""When one forward pass is enough for an update, and which rows it computes.

- With one optimizer step per batch, ``old_log_probs`` would be the log-probs of the policy that is trained, so the pass
  that computes the gradient gives them too. verl computes them in a pass of their own.
- A row whose advantages are all zero adds nothing to the gradient where the loss has no KL and no entropy term. It is
  counted in the loss's denominator and not computed.

A rank computes a fixed number of rows at a time, so its share of a batch must be a multiple of that number. With
``use_dynamic_bsz`` verl cuts micro-batches by their tokens, and a rank's share may be any number of rows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from goldilocks.losses.log_probs import mean_gap
from goldilocks.verl.driven import changed
from goldilocks.verl.patch import DISTANCE, GAP_SUM, GAP_TOKENS, MOVED_SUM, MOVED_TOKENS, WHOLE_ROWS, WHOLE_TOKENS
from goldilocks.verl.switch import in_force

# Losses that are a sum over rows, each proportional to its advantages.
BY_ROW = ("vanilla", "gspo")
DISTANCES = tuple(f"{DISTANCE}_{part}" for part in ("valid", "mean", "max"))


@dataclass(frozen=True)
class OnePass:
    """Which passes and rows a config lets an update leave out."""

    own_log_probs: bool
    rows_with_signal: bool

    @classmethod
    def of(cls, config: DictConfig, *, mini_batches: int, gate: bool) -> OnePass:
        """``mini_batches``: optimizer steps per batch and epoch; ``gate``: whether a gate reads ``old_log_probs``."""
        if not in_force("one-pass"):
            return cls(False, False)
        actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
        correction = algorithm.get("rollout_correction") or {}
        corrected = any(correction.get(key) for key in ("rollout_is", "rollout_rs", "bypass_mode"))
        distilled = OmegaConf.select(config, "distillation.enabled", default=False)
        one_update = mini_batches == 1 and actor.ppo_epochs == 1 and not distilled
        own = one_update and not gate and not algorithm.use_kl_in_reward and not corrected
        by_row = actor.policy_loss.get("loss_mode", "vanilla") in BY_ROW and _counts_rows_alone(actor)
        only_advantages = not actor.use_kl_loss and not actor.entropy_coeff and not actor.calculate_entropy
        return cls(own, one_update and not corrected and by_row and only_advantages)

    def without_correction(self, config: DictConfig) -> AbstractContextManager[None]:
        """Keep verl from comparing ``old_log_probs``, which are not there yet, with the engine's for its metrics."""
        return changed(config.algorithm, rollout_correction=None) if self.own_log_probs else nullcontext()

    def metrics(self, part: KVBatchMeta, found: dict[str, Any]) -> dict[str, float]:
        """Return the number of rows computed, and the update's distances under the names of verl's separate pass."""
        apart = {name: found.pop(f"actor/{name}") for name in DISTANCES if f"actor/{name}" in found}
        moved = _mean(found, MOVED_SUM, MOVED_TOKENS)
        return {
            **({"train/rows_computed": len(part)} if self.rows_with_signal else {}),
            **({} if moved is None or not self.own_log_probs else {"train/stale_log_prob_diff_mean": moved}),
            **{f"training/{name}": value for name, value in apart.items()},
        }

    def take_gap(self, found: dict[str, Any]) -> float | None:
        """Take the gap to the rollout engine's log-probs out of the update's metrics; None if it measured none."""
        return _mean(found, GAP_SUM, GAP_TOKENS)

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
            found = before.diff() > 0
            places = chosen(found.tolist(), ranks * micro_batch)
            keys = balanced([batch.keys[place] for place in places], batch, ranks)
        part = batch.select_keys(keys)
        part.extra_info[WHOLE_ROWS] = len(batch)
        part.extra_info[WHOLE_TOKENS] = int(stored["response_mask"].values().sum())
        return part


def _mean(found: dict[str, Any], total: str, tokens: str) -> float | None:
    """Take a sum and its count out of the update's metrics; both are means over the same micro-batches and ranks."""
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


def _counts_rows_alone(actor: Any) -> bool:
    """Whether the loss's denominator is that of the whole batch, and not the width of a micro-batch."""
    return actor.loss_agg_mode != "seq-mean-token-sum-norm" or actor.loss_scale_factor is not None


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
