"""Rows of an older policy are trained against the log-probs of the policy that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def is_bypassed(correction: Any) -> bool:
    """Whether ``algorithm.rollout_correction`` trains every row against the rollout engine's log-probs."""
    return bool(correction and correction.get("bypass_mode", False))


def behaviour_log_probs(rows: Mapping[str, Tensor], stale: Tensor, correction: Any) -> tuple[Tensor, dict[str, float]]:
    """Return the log-probs that the loss takes its ratio against, and metrics of the stale rows.

    ``rows`` has ``response_mask``, ``rollout_log_probs`` of the engine that wrote the rows, and ``old_log_probs`` of
    the current policy, or none: then they are NaN, and the update's own pass gives them. Stale rows or tokens get the
    engine's, unless a weight of verl's corrects for the difference.
    """
    mask = rows["response_mask"]
    now = rows["old_log_probs"] if "old_log_probs" in rows else torch.full_like(mask, torch.nan, dtype=torch.float32)
    stale = (stale if stale.dim() > 1 else stale.unsqueeze(-1)).expand_as(now)
    if not bool(stale.any()):
        return now, {"train/stale_rows": 0}
    if "rollout_log_probs" not in rows:
        raise ValueError(
            f"rollout_log_probs is missing in {_count(stale)} rows older than the policy: the agent loop returned "
            "no response_logprobs. With algorithm.filter_groups.max_carry_steps=0 no such rows are trained"
        )
    written, mask = rows["rollout_log_probs"].to(now.dtype), mask * stale
    metrics: dict[str, float] = {"train/stale_rows": _count(stale), "train/stale_tokens": int(mask.sum())}
    if "old_log_probs" in rows and not is_bypassed(correction):
        moved = ((now - written).abs() * mask).sum() / mask.sum().clamp(min=1)
        metrics["train/stale_log_prob_diff_mean"] = float(moved)
    # A correction that weighs rows by π_old / π_rollout needs π_old as the current policy has it.
    weighted = bool(correction and correction.get("rollout_is", None)) and not is_bypassed(correction)
    return (now if weighted else torch.where(stale, written, now)), metrics


def _count(stale: Tensor) -> int:
    """Return how many rows have a stale token."""
    return int(stale.any(-1).sum())
