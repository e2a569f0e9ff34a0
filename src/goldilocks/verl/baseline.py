"""Which advantage estimator the V1 trainer uses: over all rollouts seen, where only part of a group is trained."""

from __future__ import annotations

from goldilocks.algorithms import pool_estimator
from goldilocks.settings import Settings


def estimator_for(settings: Settings) -> str:
    """Return the estimator's name; one that cannot have its baseline from all rollouts is a ``ValueError``."""
    if not settings.trains_part_of_groups:
        return settings.adv_estimator
    return pool_estimator(settings.adv_estimator, settings.use_kl_in_reward)
