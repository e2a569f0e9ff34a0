"""Advantage estimators over all rollouts seen, for groups of which only a part is trained.

Importing this module registers them with verl, as ``<name>_pool``.
"""

from __future__ import annotations

from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est

from goldilocks.algorithms import pool_estimator
from goldilocks.algorithms.reward_pool import POOLED, SUFFIX, normalised_by_config, pooled
from goldilocks.config.settings import Settings

for name in POOLED:
    estimator = get_adv_estimator_fn(name)
    register_adv_est(name + SUFFIX)(pooled(normalised_by_config(estimator) if name == "grpo" else estimator))


def estimator_for(settings: Settings) -> str:
    """Return the name of the estimator; raise ``ValueError`` if its baseline cannot be over all rollouts."""
    if not settings.trains_part_of_groups:
        return settings.adv_estimator
    return pool_estimator(settings.adv_estimator, settings.use_kl_in_reward)
