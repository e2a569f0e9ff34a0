"""Registers the advantage estimator ``grpo_pool`` with verl by being imported."""

from __future__ import annotations

from verl.trainer.ppo.core_algos import register_adv_est

from goldilocks.algorithms import reward_pool

register_adv_est(reward_pool.NAME)(reward_pool.grpo_pool)
