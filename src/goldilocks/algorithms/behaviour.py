"""Training on rows of an older policy: against the log-probs of the policy that wrote them, and with a guard.

The guard is that of M2PO (arXiv 2510.01161). A token's distance is (log π − log π_behaviour)², by the policy that is
trained and the one that wrote the token.

- Tokens that the update would push further away (a positive advantage and a ratio above 1, or a negative one and a
  ratio below 1) are masked, the largest distance first, until their mean distance is within ``bound``.
- M2 is the mean distance of all tokens with an advantage. An update with M2 beyond ``skip`` is not made.

A masked token has an advantage of zero. Baselines, and the rows and tokens that a loss is divided by, do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GUARD_SUMS = ("squares", "tokens", "guarded_tokens", "guarded_rows")  # over micro-batches and processes


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


def pushed_tokens(log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return which tokens the update would move further from the policy that wrote them."""
    return mask & (advantages * log_ratio > 0)


def cutoff(squares: Tensor, pushed: Tensor, bound: float) -> Tensor:
    """Return the distance at and above which pushed tokens are masked; infinity where their mean is within the bound.

    The mean of the k smallest distances grows with k, so the largest k within the bound leaves out the fewest tokens.
    """
    ascending = torch.where(pushed, squares, torch.inf).flatten().sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=squares.device)
    beyond = torch.cat([ascending, ascending.new_full((1,), torch.inf)])
    return beyond[(means <= bound).sum()]


def kept_tokens(log_ratio: Tensor, advantages: Tensor, mask: Tensor, bound: float) -> Tensor:
    """Return which tokens keep their advantage; all arguments but the bound are [rows, tokens]."""
    pushed = pushed_tokens(log_ratio, advantages, mask)
    squares = log_ratio.double().square()
    return ~pushed | (squares < cutoff(squares, pushed, bound))


@dataclass(frozen=True)
class GuardVerdict:
    """Whether the update of a mini-batch is skipped, and the metrics of its guard."""

    skip: bool
    metrics: dict[str, float]


class UpdateGuard:
    """Guards the micro-batches of one mini-batch after another.

    Each micro-batch is within the bound, so the mini-batch is. The verdict is on the whole mini-batch of all processes.
    """

    def __init__(self, bound: float, skip: float | None) -> None:
        self._bound = bound
        self._skip = skip
        self._sums: Tensor | None = None

    @torch.no_grad()
    def guarded(self, log_prob: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the advantages of a micro-batch, zero for masked tokens; NaN in ``behaviour`` means this policy's own.

        ``advantages`` are [rows, 1] or [rows, tokens], the others [rows, tokens].
        """
        mask = mask.bool()
        written = mask & ~behaviour.isnan()
        log_ratio = torch.where(written, log_prob - behaviour, 0.0)
        advantages = advantages.expand_as(log_ratio)
        kept = kept_tokens(log_ratio, advantages, mask, self._bound)
        trained = mask & (advantages != 0)
        squares = torch.where(trained, log_ratio.double().square(), 0.0)
        counts = (squares.sum(), trained.sum(), (~kept).sum(), (~kept).any(-1).sum())
        found = torch.stack([count.double() for count in counts])
        self._sums = found if self._sums is None else self._sums + found
        return advantages * kept

    def verdict(self, summed: Callable[[Tensor], Tensor]) -> GuardVerdict:
        """Return the verdict on the mini-batch, and begin the next; ``summed`` adds a tensor up over all processes."""
        sums = torch.zeros(len(GUARD_SUMS), dtype=torch.float64) if self._sums is None else self._sums
        self._sums = None
        found = dict(zip(GUARD_SUMS, summed(sums).tolist(), strict=True))
        moment = found["squares"] / max(1.0, found["tokens"])
        skip = self._skip is not None and not moment <= self._skip  # a NaN is beyond any bound
        metrics = {
            "replay/m2": moment,
            "replay/guarded_rows": found["guarded_rows"],
            "replay/guarded_tokens": found["guarded_tokens"],
            "replay/skipped_updates": float(skip),
        }
        return GuardVerdict(skip, metrics)
