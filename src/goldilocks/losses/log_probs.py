"""Log-probs of trainer and rollout engine: a guard for old weights, and the ratios of rows of an older policy.

The guard compares both log-probs of fresh rows. Both sides compute the same log-probs of a row that the newest weights
wrote, up to rounding. An engine that did not get the newest weights, or got them without an adapter, still generates,
and its rewards still look sound; the mean of |log π − log π of the engine| over the tokens of fresh rows shows it. Both
log-probs are there anyway.

Rows of an older policy are trained against the log-probs of the policy that wrote them: ``behaviour_log_probs``.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from goldilocks.dotted_keys import dotted_keys, value_at

logger = logging.getLogger(__name__)

ERROR = "error"  # of goldilocks.on_stale_weights
NOT_JUDGED = "here the engine's log-probs are not the trainer's by design, as with top_p or quantization, or not kept"
IN_A_ROW = 2  # updates beyond the limit before the guard speaks
RECENT = 20  # sound gaps that the next one is compared with
GROWTH = 4.0  # the limit, in medians of the recent gaps
# What rounding explains: a gap below the first is always sound, one above the second never is.
FP32, HALF = (1e-3, 0.05), (0.05, 0.2)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # in configs of transformers


class StaleWeights(RuntimeError):
    """The rollout engine does not sample from the policy that is trained."""


class WeightsGuard:
    """Judges the gap of one update after another. It speaks once in a run."""

    def __init__(self, action: str, *, exact: bool, judges: bool = True) -> None:
        """``exact``: both sides compute in fp32. ``judges``: there is no reason other than old weights for a gap."""
        if action == ERROR and not judges:
            logger.warning("goldilocks.on_stale_weights=error has no effect: %s", NOT_JUDGED)
        self._action = action
        self._bounds = FP32 if exact else HALF
        self.judges = judges  # whether a gap means something, and nothing was said of it yet
        self._sound: deque[float] = deque(maxlen=RECENT)
        self._beyond: list[float] = []  # the gaps of the last updates, while they are beyond the limit

    @property
    def limit(self) -> float:
        """The largest gap that the precision explains."""
        lowest, highest = self._bounds
        usual = median(self._sound) if self._sound else math.inf
        return min(max(GROWTH * usual, lowest), highest)

    def observe(self, gap: float | None) -> dict[str, float]:
        """Return the metric of an update; ``gap`` is None where no row was fresh. Raises if the user asked for it."""
        if gap is None:
            return {}
        metric = {"rollout/weights_gap": gap}
        if not self.judges:
            return metric
        if gap <= self.limit:
            self._beyond = []
            self._sound.append(gap)
            return metric
        self._beyond.append(gap)  # a NaN is beyond any limit
        if len(self._beyond) == IN_A_ROW:
            message = self._message()
            if self._action == ERROR:
                raise StaleWeights(message)
            self.judges = False
            logger.warning("%s. goldilocks.on_stale_weights=error ends a run here", message)
        return metric

    def _message(self) -> str:
        gaps = " and ".join(f"{gap:.2g}" for gap in self._beyond)
        if self._sound:
            cause = f"It was {median(self._sound):.2g} before, so most likely the engine has older weights"
        else:
            cause = "It was so from the start, so most likely the engine has another model, precision or adapter"
        return (
            f"rollout/weights_gap is {gaps} in {IN_A_ROW} updates in a row, where the precision explains "
            f"{self.limit:.2g}: trainer and rollout engine have different log-probs for the same tokens. {cause}"
        )


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a model with this config routes tokens to experts: rounding decides which."""
    found = [key for key in dotted_keys(config) if key.rpartition(".")[2] in EXPERTS]
    return any(value_at(config, key) not in (None, 0, 1) for key in found)


def gap_sums(trained: Tensor, sampled: Tensor, fresh: Tensor) -> Tensor:
    """Return [sum of gaps, number of tokens] over the tokens that ``fresh`` marks; all three have one shape."""
    apart = torch.where(fresh, (trained.float() - sampled.float()).abs(), 0.0)
    return torch.stack([apart.sum(dtype=torch.float64), fresh.sum().double()])


def mean_gap(sums: Sequence[float]) -> float | None:
    """Return the mean gap of ``gap_sums``; None where there was no token."""
    total, tokens = sums
    return total / tokens if tokens else None


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
    return int(stale.any(-1).sum())
