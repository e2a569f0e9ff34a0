"""Registers the advantage estimators ``<name>_pool`` with verl by being imported."""

from __future__ import annotations

from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est

from goldilocks.algorithms.reward_pool import POOLED, SUFFIX, normalised_by_config, pooled

for name in POOLED:
    estimator = get_adv_estimator_fn(name)
    register_adv_est(name + SUFFIX)(pooled(normalised_by_config(estimator) if name == "grpo" else estimator))
