"""Advantage estimators over all rollouts seen, for groups of which only a part is trained.

Importing this module registers them with verl, as ``<name>_pool``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est

from goldilocks.config.settings import Settings
from goldilocks.errors import require
from goldilocks.losses.advantages import (
    POOLED,
    SUFFIX,
    normalised_by_config,
    pool_estimator,
    pooled,
    rows_of_rollouts,
    whitened,
)
from goldilocks.runs.records import part_of_row, split_row_key

GRPO = get_adv_estimator_fn("grpo")
# verl whitens these advantages token by token: GRPO's, without its own scale.
OF_ROLLOUTS = {"reinforce_plus_plus_baseline": whitened(partial(GRPO, norm_adv_by_std_in_grpo=False))}
for name in POOLED:
    estimator = normalised_by_config(GRPO) if name == "grpo" else get_adv_estimator_fn(name)
    register_adv_est(name + SUFFIX)(pooled(estimator, OF_ROLLOUTS.get(name)))


def estimator_for(settings: Settings) -> str:
    """Return the name of the estimator; raise ``ValueError`` if its baseline cannot be over all rollouts."""
    if not settings.trains_part_of_groups:
        return settings.adv_estimator
    return pool_estimator(settings.adv_estimator, settings.use_kl_in_reward)


@contextmanager
def counting_rollouts(algorithm: Any, keys: Sequence[str]) -> Iterator[None]:
    """Have the advantages of these rows computed over rollouts; ``algorithm`` is that section of verl's config.

    verl's own ``grpo`` does so. Other estimators of verl take each row for a rollout, so where a rollout has several
    rows, the pool's estimator stands in: its values are the same for rollouts of one row.
    """
    if not any(map(part_of_row, keys)):
        yield
        return
    rows = [(split_row_key(key), part_of_row(key)) for key in keys]
    before, algorithm.adv_estimator = algorithm.adv_estimator, several_rows_estimator(algorithm)
    try:
        with rows_of_rollouts(rows):
            yield
    finally:
        algorithm.adv_estimator = before


def several_rows_estimator(algorithm: Any) -> str:
    """Return the estimator for rollouts of several rows; raise ``ValueError`` if this config has none for them.

    It would read a KL penalty in the reward in the last rows alone.
    """
    name: str = algorithm.adv_estimator
    accepted = (
        f"False with algorithm.adv_estimator={name} where rollouts have several rows: the reward of a rollout is that "
        "of its last row, without the penalty of the others. Use actor_rollout_ref.actor.use_kl_loss=True"
    )
    whole = not algorithm.use_kl_in_reward or name.removesuffix(SUFFIX) not in POOLED
    require(whole, "algorithm.use_kl_in_reward", algorithm.use_kl_in_reward, accepted)
    return name if name == "grpo" else pool_estimator(name, use_kl_in_reward=False)
