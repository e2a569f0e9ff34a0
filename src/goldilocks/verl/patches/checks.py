"""verl's check of a config begins with ours: the driver says what is wrong before Ray is started."""

from __future__ import annotations

import functools
import logging
from typing import Any

from goldilocks.verl.patches.patch import Function

logger = logging.getLogger(__name__)


def checked_first(original: Function) -> Function:
    """Check the rollout server's limits and the algorithm, then do what verl does."""

    @functools.wraps(original)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        check(config)
        original(config, *args, **kwargs)

    return validate_config


def check(config: Any) -> None:
    """Raise ``ValueError`` for what our rollout server or an algorithm cannot do; log what is likely a mistake."""
    from omegaconf import OmegaConf

    from goldilocks.algorithms.checks import check_algorithm
    from goldilocks.verl.serve import limits

    for warning in check_algorithm(config):
        logger.warning(warning)
    if OmegaConf.select(config, "actor_rollout_ref.rollout.name") == limits.NAME:
        limits.check(config.actor_rollout_ref.rollout, config.actor_rollout_ref.model)
