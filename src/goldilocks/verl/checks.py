"""Refuses a config that our trainers do not support, by its key, before anything starts. Imports nothing of verl."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from goldilocks.config.settings import Settings
from goldilocks.dotted_keys import value_at
from goldilocks.errors import require
from goldilocks.types import OnFull

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)

CAN_PAUSE = ("transformers", "vllm")
SAMPLER = "trainer.v1.sampler"
VERLS_BOUNDS = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop"}  # verl's defaults
GUARDED_LOSSES = ("vanilla", "gspo")  # a token's term is proportional to its advantage
GUARDED_ENGINES = ("fsdp", "fsdp2")
MANAGER = "goldilocks.verl.dispatch.manager.StreamingManager"


def check_run(config: DictConfig) -> None:
    """Raise ``ValueError`` for what an algorithm or our rollout server cannot do; log what is likely a mistake."""
    for warning in _mistakes(config):
        logger.warning(warning)


def _mistakes(config: DictConfig) -> list[str]:
    from goldilocks.algorithms.checks import check_algorithm  # imports torch
    from goldilocks.verl import media
    from goldilocks.verl.serve import limits

    warnings = check_algorithm(config)
    if config.actor_rollout_ref.rollout.get("name", None) == limits.NAME:
        limits.check(config.actor_rollout_ref.rollout, config.actor_rollout_ref.model)
        media.check_text(config.data, f"rollout.name={limits.NAME} takes text; or use rollout.name=vllm")
    else:
        media.check_readable(config)
    return warnings


def check_v1(config: DictConfig) -> None:
    """Raise ``ValueError`` for a config that the V1 trainer does not support, or would ignore."""
    _mistakes(config)
    with_us = "with trainer.v1.trainer_mode=goldilocks"
    key = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    manager = value_at(config, key)
    require(manager in (None, MANAGER), key, manager, f"none {with_us}, or {MANAGER}")
    key = f"{SAMPLER}.custom_sampler.path"
    policies = "which samples by goldilocks.selector, goldilocks.allocator and goldilocks.filter"
    require(not value_at(config, key), key, value_at(config, key), f"none {with_us}, {policies}")
    _check_bounds_on_age(config)
    _check_pausing(config)
    if value_at(config, "goldilocks.guard.enable"):
        _check_guard(config)
    _check_reward_model(config, f"{with_us}, since a group is judged when its rollouts arrive and needs their rewards")


def _check_reward_model(config: DictConfig, why: str) -> None:
    model = config.reward.reward_model
    apart = model.enable_resource_pool
    require(not model.enable or apart, "reward.reward_model.enable_resource_pool", apart, f"True {why}")


def _check_bounds_on_age(config: DictConfig) -> None:
    """Refuse verl's bounds on the age of a group: the collector has its own.

    verl's defaults cannot be told from values that a user chose, so they are accepted.
    """
    for name, default in VERLS_BOUNDS.items():
        value = config.trainer.v1.sampler.get(name, default)
        accepted = f"{default} (verl's default, not used) with trainer.v1.trainer_mode=goldilocks or goldilocks_async; "
        accepted += "algorithm.filter_groups.max_carry_steps bounds the age of what is trained"
        require(value == default, f"{SAMPLER}.{name}", value, accepted)


def _check_pausing(config: DictConfig) -> None:
    """Rollouts pause where a server ends a request on demand and returns what it has written."""
    key = "algorithm.filter_groups.on_full"
    on_full, engine = value_at(config, key), config.actor_rollout_ref.rollout.get("name", None)
    accepted = f"finish or requeue with rollout.name={engine}; partial needs {' or '.join(CAN_PAUSE)}"
    require(on_full != OnFull.PARTIAL or engine in CAN_PAUSE, key, on_full, accepted)


def _check_guard(config: DictConfig) -> None:
    """The guard masks a token by its advantage, and skips an update by removing the optimizer's gradients."""
    actor = config.actor_rollout_ref.actor
    mode, strategy = actor.policy_loss.get("loss_mode", "vanilla"), actor.strategy
    distilled = value_at(config, "distillation.enabled")
    for sound, accepted in (
        (mode in GUARDED_LOSSES, f"False with loss_mode={mode}; True with {' or '.join(GUARDED_LOSSES)}"),
        (strategy in GUARDED_ENGINES, f"False with actor.strategy={strategy}; True with fsdp or fsdp2"),
        (not distilled, "False with distillation.enabled=True, which has a loss of its own"),
    ):
        require(sound, "goldilocks.guard.enable", True, accepted)


def check_v0(config: DictConfig, settings: Settings) -> None:
    """Raise ``ValueError`` for a config that the V0 trainer does not support."""
    _mistakes(config)
    _check_reward_model(config, "since groups are judged by rewards while the rollout servers hold the GPUs")
    estimator = config.algorithm.adv_estimator
    require(estimator != "remax", "algorithm.adv_estimator", "remax", "an estimator without a greedy baseline")
    on_full = settings.surplus().on_full
    accepted = "finish or requeue on verl's V0 trainer; trainer.use_v1=True has partial"
    require(on_full is not OnFull.PARTIAL, "algorithm.filter_groups.on_full", on_full, accepted)
    guarded = settings.guard().enable
    require(not guarded, "goldilocks.guard.enable", guarded, "False on verl's V0 trainer; trainer.use_v1=True has it")
