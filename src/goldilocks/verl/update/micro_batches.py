"""How many rows a rank computes at a time: what it is given of a batch must be a multiple of it.

With ``use_dynamic_bsz`` verl cuts micro-batches by their tokens, and a rank may be given any number of rows.
"""

from __future__ import annotations

from omegaconf import DictConfig


def of_update(config: DictConfig) -> int:
    actor = config.actor_rollout_ref.actor
    return _rows(actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu)


def of_log_probs(config: DictConfig) -> int:
    """Of the pass over the actor; verl requires that it is cut like the update, by tokens or by rows."""
    parts = config.actor_rollout_ref
    return _rows(parts.actor.use_dynamic_bsz, parts.rollout.log_prob_micro_batch_size_per_gpu)


def of_reference(config: DictConfig) -> int:
    ref = config.actor_rollout_ref.ref
    return _rows(ref.log_prob_use_dynamic_bsz, ref.log_prob_micro_batch_size_per_gpu)


def _rows(dynamic: bool, size: int | None) -> int:
    return 1 if dynamic else size or 1  # None: the model is not built, or verl refuses the config itself
