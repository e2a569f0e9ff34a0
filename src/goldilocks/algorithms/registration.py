"""The algorithms in verl's registries, under the names a config gives them: ``gspo`` measured, ``grpo_pool`` added.

The plug-in calls each function once, right after the module of verl it belongs to has been imported. verl's ``gspo``
and its config check are wrapped, so each names the source it was written against and stays off where verl's is another.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from goldilocks.algorithms import pool
from goldilocks.algorithms.checks import check_algorithm
from goldilocks.algorithms.gspo import PolicyLoss, with_clipping_metrics
from goldilocks.verl.patches import Patch

logger = logging.getLogger(__name__)


def register_estimator() -> None:
    """``algorithm.adv_estimator=grpo_pool``."""
    from verl.trainer.ppo.core_algos import register_adv_est

    register_adv_est(pool.NAME)(pool.grpo_pool)


def measure_gspo() -> None:
    """``actor.policy_loss.loss_mode=gspo`` returns the metrics of its clipping."""
    GSPO_METRICS.apply()


def check_first() -> None:
    """verl's check of a config begins with ours, in every run: what it says is logged once, by the driver."""
    ALGORITHM_CHECKS.apply()


def _registered(original: PolicyLoss) -> PolicyLoss:
    """verl looks a loss up by name; the function of the module is a second reference to it."""
    from verl.trainer.ppo.core_algos import register_policy_loss

    measured: PolicyLoss = register_policy_loss("gspo")(with_clipping_metrics(original))
    return measured


def _checked(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        for warning in check_algorithm(config):
            logger.warning(warning)
        original(config, *args, **kwargs)

    return validate_config


GSPO_METRICS = Patch(
    "GSPO's clipping metrics",
    "verl.trainer.ppo.core_algos",
    "compute_policy_loss_gspo",
    "fd4ceb495b6b2c75",
    _registered,
)
ALGORITHM_CHECKS = Patch(
    "checks of the algorithm", "verl.utils.config", "validate_config", "ab4096deecfec745", _checked
)
