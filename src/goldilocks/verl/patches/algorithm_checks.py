"""verl's check of a config begins with ours, by importing this: whichever trainer runs, the driver says it once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from goldilocks.algorithms.checks import check_algorithm
from goldilocks.verl.patches.patch import Patch

logger = logging.getLogger(__name__)


def _checked(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        for warning in check_algorithm(config):
            logger.warning(warning)
        original(config, *args, **kwargs)

    return validate_config


ALGORITHM_CHECKS = Patch(
    "checks of the algorithm", "verl.utils.config", "validate_config", "ab4096deecfec745", _checked
)

ALGORITHM_CHECKS.apply()
