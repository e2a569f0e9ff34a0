"""Checks before the first arm is started. Every error is one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from goldilocks.compare.arm import SEEDS, STEPS
from goldilocks.compare.grid import Grid, combinations
from goldilocks.compare.study import Study
from goldilocks.compare.units import GROUPS, MINI_BATCH
from goldilocks.errors import require
from goldilocks.launch import defaults, on_trl
from goldilocks.launch.preflight import check_budget, check_paths
from goldilocks.launch.recipe import choose
from goldilocks.launch.train import composed
from goldilocks.settings import Settings

OWN = (
    "goldilocks.budget",
    "goldilocks.study",
    "trainer.val_before_train",
    "trainer.test_freq",
    "trainer.resume_mode",
    *SEEDS,
)


def check_study(study: Study, device: str) -> None:
    """Check that every recipe composes, and the first one with every value of the grid."""
    _check_keys(study)
    arms = study.reported_arms(study.choose([]))[: len(study.recipes)]
    for arm in [*arms, *(replace(arms[0], settings=settings) for settings in _every_value(study.grid))]:
        config = composed(choose(arm.command(study.overrides), device), Path(arm.name))
        defaults.locate(config)
        check_budget(config)
        Settings.from_config(config)
        if on_trl.chosen(config):
            on_trl.check_keys(config)
        if not any(_key(word) == STEPS for word in study.overrides):
            _check_schedule(config)
        defaults.provide(config)
        check_paths(config)


def _every_value(grid: Grid) -> list[dict[str, str]]:
    """Return combinations that have every value once, after the first of each, which is checked already."""
    first = combinations(grid)[0]
    return [{**first, key: value} for key, values in grid.items() for value in values[1:]]


def _check_keys(study: Study) -> None:
    for word in (*study.overrides, *study.grid):
        if any(_key(word) == own or _key(word).startswith(f"{own}.") for own in OWN):
            raise ValueError(
                f"{word!r} is not accepted: goldilocks compare sets {_key(word)} itself, for every arm alike"
            )
        doubled = GROUPS in study.grid and _key(word) == MINI_BATCH
        require(not doubled, MINI_BATCH, word.partition("=")[2], f"nothing beside --tune {GROUPS}, which sets it")


def _check_schedule(config: DictConfig) -> None:
    """Refuse a learning-rate schedule over all steps: with a budget the number of steps is not known."""
    optim = config.actor_rollout_ref.actor.optim
    warmup, kind = optim.get("lr_warmup_steps_ratio") or 0.0, optim.get("lr_scheduler_type") or "constant"
    if warmup or kind != "constant":
        given = f"lr_warmup_steps_ratio={warmup}" if warmup else f"lr_scheduler_type={kind}"
        raise ValueError(
            f"actor_rollout_ref.actor.optim.{given} needs a number of steps, and a budget gives none: "
            f"set lr_warmup_steps and a constant rate, or {STEPS}=N for the schedule alone"
        )


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
