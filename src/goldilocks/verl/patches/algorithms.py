"""The algorithms under the names a config gives them, added by being imported: ``gspo`` measured, ``grpo_pool`` new.

verl's ``gspo`` is wrapped: the wrapper names the source it was written against, and stays off where verl's is another.
"""

from __future__ import annotations

from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

from goldilocks.algorithms import reward_pool
from goldilocks.algorithms.gspo import PolicyLoss, with_clipping_metrics
from goldilocks.verl.patches.patch import Patch


def _registered(original: PolicyLoss) -> PolicyLoss:
    """verl looks a loss up by name; the function of the module is a second reference to it."""
    measured: PolicyLoss = register_policy_loss("gspo")(with_clipping_metrics(original))
    return measured


GSPO_METRICS = Patch(
    "metrics of gspo",
    "verl.trainer.ppo.core_algos",
    "compute_policy_loss_gspo",
    "fd4ceb495b6b2c75",
    _registered,
)

GSPO_METRICS.apply()
register_adv_est(reward_pool.NAME)(reward_pool.grpo_pool)
