"""Checks of an algorithm's config, made before any GPU time is spent.

Nothing here imports verl: a config is any nested object with ``get``.
"""

from __future__ import annotations

from typing import Any

from goldilocks.errors import require
from goldilocks.losses import prompt_mean, reward_pool
from goldilocks.losses.gspo import clip_range

# The losses that clip a ratio from both sides. CISPO is not one: it is run with a lower bound that never binds.
CLIPPED = ("vanilla", "gspo", "geo_mean", "clip_cov", "bypass_mode")
GSPO_AGG_MODE = "seq-mean-token-mean"
TOKEN_LEVEL = 0.01  # ε of GSPO is a few 1e-4, of token-level PPO a few 1e-1
ACTOR = "actor_rollout_ref.actor"


def check_algorithm(config: Any) -> list[str]:
    """Return warnings about verl's whole ``config``; raise ``ValueError`` for a setting that cannot be meant."""
    actor = config.get("actor_rollout_ref").get("actor")
    mode = actor.get("policy_loss", {}).get("loss_mode", "vanilla")
    if mode in CLIPPED:
        low, high = clip_range(actor)
        accepted = f"at most clip_ratio_high={high} (the usual pairs: 0.2 and 0.28; for gspo 0.0003 and 0.0004)"
        require(low <= high, f"{ACTOR}.clip_ratio_low", low, accepted)
    algorithm = config.get("algorithm") or {}
    reward_pool.check_pool(algorithm.get("adv_estimator") or "", bool(algorithm.get("use_kl_in_reward")))
    warnings = _about_gspo(actor) if mode == "gspo" else []
    if (config.get("goldilocks") or {}).get("loss_agg") is not None:
        warnings += _about_prompt_mean(config, actor, mode)
    return warnings


def _about_gspo(actor: Any) -> list[str]:
    low, high = clip_range(actor)
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


def _about_prompt_mean(config: Any, actor: Any, mode: str) -> list[str]:
    how, agg_mode = config.get("goldilocks").get("loss_agg"), actor.get("loss_agg_mode")
    require(how == "prompt-mean", "goldilocks.loss_agg", how, f"prompt-mean, or null for {ACTOR}.loss_agg_mode alone")
    modes = ", ".join(prompt_mean.LOSS_MODES)
    accepted = f"with goldilocks.loss_agg=prompt-mean a loss that scales with the advantage: {modes}"
    require(mode in prompt_mean.LOSS_MODES, f"{ACTOR}.policy_loss.loss_mode", mode, accepted)
    prompt_mean.require_agg_mode(agg_mode)
    warnings = []
    if agg_mode == "token-mean" and actor.get("ppo_mini_batch_size") != config.get("data").get("train_batch_size"):
        warnings.append(
            f"goldilocks.loss_agg=prompt-mean with {ACTOR}.loss_agg_mode=token-mean and several mini-batches: prompts "
            f"weigh the same only as far as mini-batches hold equally many tokens; the seq-mean modes are exact"
        )
    terms = {"use_kl_loss": actor.get("use_kl_loss"), "entropy_coeff": actor.get("entropy_coeff")}
    warnings += [
        f"goldilocks.loss_agg=prompt-mean weighs the policy-gradient term; {ACTOR}.{key}={value} adds one that "
        f"keeps loss_agg_mode={agg_mode}"
        for key, value in terms.items()
        if value
    ]
    return warnings
