"""Policy losses of verl: checks of their config before any GPU time is spent, and metrics of GSPO's clipping.

Nothing here imports verl: a config is any nested object with ``get``.

verl's loss and metrics stay the same to the bit, except ``actor/pg_clipfrac_lower``, which verl fills with a constant
0. The lower and the upper share sum to verl's own ``actor/pg_clipfrac``. verl takes the plain mean of a policy loss's
metrics over micro-batches, ranks and mini-batches, and needs the same names from every micro-batch: so one that is all
padding reports a ratio of 1, as an unmoved policy would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from goldilocks.errors import require
from goldilocks.losses.advantages import check_pool

# The losses that clip a ratio from both sides. CISPO is not one: it is run with a lower bound that never binds.
CLIPPED = ("vanilla", "gspo", "geo_mean", "clip_cov", "bypass_mode")
GSPO_AGG_MODE = "seq-mean-token-mean"
TOKEN_LEVEL = 0.01  # ε of GSPO is a few 1e-4, of token-level PPO a few 1e-1
ACTOR = "actor_rollout_ref.actor"
MAX_LOG_RATIO = 10.0  # where verl's loss clamps it
QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Any]]]


def check_algorithm(config: Any) -> list[str]:
    """Return warnings about verl's whole ``config``; raise ``ValueError`` for a setting that cannot be meant."""
    actor = config.get("actor_rollout_ref").get("actor")
    mode = actor.get("policy_loss", {}).get("loss_mode", "vanilla")
    low, high = clip_range(actor)
    if mode in CLIPPED:
        accepted = f"at most clip_ratio_high={high} (the usual pairs: 0.2 and 0.28; for gspo 0.0003 and 0.0004)"
        require(low <= high, f"{ACTOR}.clip_ratio_low", low, accepted)
    algorithm = config.get("algorithm") or {}
    check_pool(algorithm.get("adv_estimator") or "", bool(algorithm.get("use_kl_in_reward")))
    if mode != "gspo":
        return []
    warnings = []
    if max(low, high) >= TOKEN_LEVEL:
        warnings.append(
            f"{ACTOR}.policy_loss.loss_mode=gspo with clip_ratio_low={low}, clip_ratio_high={high}: a token-level "
            f"range, which a sequence's ratio hardly ever leaves, so next to nothing is clipped; GSPO uses 0.0003 "
            f"and 0.0004"
        )
    if actor.get("loss_agg_mode") != GSPO_AGG_MODE:
        warnings.append(
            f"{ACTOR}.policy_loss.loss_mode=gspo with loss_agg_mode={actor.get('loss_agg_mode')}: long answers weigh "
            f"more than short ones; GSPO uses {GSPO_AGG_MODE}"
        )
    return warnings


def check_older_rows(config: Any, max_carry_steps: int) -> None:
    """Raise ``ValueError`` for GSPO with rows of an older policy, which have the log-probs of the rollout engine.

    Its rounding, or a sampling such as ``top_p``, moves a sequence's mean log-prob further than GSPO's range is wide:
    rows of a policy that has not moved at all lose their gradient.
    """
    actor, algorithm = config.get("actor_rollout_ref").get("actor"), config.get("algorithm")
    correction = algorithm.get("rollout_correction", None) or {}
    mode = actor.get("policy_loss", {}).get("loss_mode", "vanilla")
    corrected = correction.get("rollout_is", None) or correction.get("bypass_mode", False)
    high = max(clip_range(actor))
    accepted = (
        f"0, and on_full=finish or requeue, with {ACTOR}.policy_loss.loss_mode=gspo and a clip range of {high:g}: an "
        "older answer has the rollout engine's log-probs, whose rounding is wider than the range. Or correct for it "
        "with algorithm.rollout_correction.rollout_is=sequence"
    )
    sound = mode != "gspo" or high >= TOKEN_LEVEL or bool(corrected)
    require(sound, "algorithm.filter_groups.max_carry_steps", max_carry_steps, accepted)


def sequence_ratio(old_log_prob: Tensor, log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Return each row's importance ratio s = exp(mean over its tokens of log π − log π_old), as in verl's loss."""
    log_ratio = ((log_prob - old_log_prob) * response_mask).sum(-1) / response_mask.sum(-1).clamp(min=1)
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


@torch.no_grad()
def clipping_metrics(
    ratio: Tensor, advantages: Tensor, response_mask: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> dict[str, float]:
    """Return where the clip binds, as a share of tokens, and how the ratio is spread over sequences.

    The clip takes the gradient away below 1 − ε_low where the advantage is negative, above 1 + ε_high where positive.
    """
    tokens = response_mask.sum().clamp(min=1)
    below = (ratio < 1 - clip_ratio_low).unsqueeze(-1) & (advantages < 0)
    above = (ratio > 1 + clip_ratio_high).unsqueeze(-1) & (advantages > 0)
    # Over the real rows, 1 if there is none. A NaN of a row shows in the mean.
    ratio, real = ratio.float(), response_mask.bool().any(-1)
    points = torch.tensor(list(QUANTILES.values()), dtype=ratio.dtype, device=ratio.device)
    quantiles = torch.where(real.any(), torch.where(real, ratio, torch.nan).nanquantile(points), 1)
    values = {
        "pg_clipfrac_lower": (below * response_mask).sum() / tokens,
        "pg_clipfrac_upper": (above * response_mask).sum() / tokens,
        "seq_importance_ratio": 1 + torch.where(real, ratio - 1, 0).sum() / real.sum().clamp(min=1),
        **{f"seq_importance_ratio_{name}": one for name, one in zip(QUANTILES, quantiles.unbind(), strict=True)},
    }
    numbers = torch.stack(list(values.values())).tolist()  # one wait for the device, not one per metric
    return {f"actor/{name}": number for name, number in zip(values, numbers, strict=True)}


def with_clipping_metrics(loss: PolicyLoss) -> PolicyLoss:
    """Return verl's GSPO loss with the metrics of its clipping added."""

    @functools.wraps(loss)
    def compute_policy_loss_gspo(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "seq-mean-token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        value, metrics = loss(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
        )
        ratio = sequence_ratio(old_log_prob, log_prob.detach(), response_mask)
        return value, {**metrics, **clipping_metrics(ratio, advantages, response_mask, *clip_range(config))}

    return compute_policy_loss_gspo


def clip_range(actor: Any) -> tuple[float, float]:
    """Return ε_low and ε_high of an actor's config; ``clip_ratio`` replaces one that is null."""
    low, high = actor.get("clip_ratio_low"), actor.get("clip_ratio_high")
    both = actor.get("clip_ratio")
    return (both if low is None else low), (both if high is None else high)
