"""Registers the advantage estimators ``<name>_pool`` with verl by being imported.

Which advantage estimator the V1 trainer uses: over all rollouts seen, where only part of a group is trained.
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
    """Return the estimator's name; one that cannot have its baseline from all rollouts is a ``ValueError``."""
    if not settings.trains_part_of_groups:
        return settings.adv_estimator
    return pool_estimator(settings.adv_estimator, settings.use_kl_in_reward)
