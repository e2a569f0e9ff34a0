"""The policies of a recipe, as ``goldilocks train`` would build them, with the sizes of a simulation.

A simulation differs in two places. It ends when its budget is spent, so ``max_num_gen_batches``, which stops a training
run on data that yield nothing, is lifted. And the batch filter, which needs a trainer's log-probs, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from goldilocks.errors import require
from goldilocks.nested import merged, with_value
from goldilocks.recipes import read_recipe
from goldilocks.settings import Settings
from goldilocks.simulate.run import Setup

Config = Mapping[str, Any]


def recipe_config(recipe: str) -> Config:
    """Return the keys of a recipe, with ``max_num_gen_batches`` lifted."""
    return with_value(read_recipe(recipe), "algorithm.filter_groups.max_num_gen_batches", 0)


def settings_of(config: Config, setup: Setup) -> Settings:
    """Return the trainer's settings for this config and the sizes of this setup. Raises ``ValueError`` as it would."""
    sizes = {
        "train_batch_size": setup.target_groups,
        "gen_batch_size": setup.gen_batch_size,
        "max_response_length": setup.engine.max_tokens,
        "seed": setup.seed,
    }
    settings = Settings.from_config(merged(config, {"data": sizes}))
    simulated = settings.batch_filter_config is None
    require(simulated, "batch_filter.enable", True, "false: the batch filter is not simulated")
    return settings


def recipe_settings(recipe: str, setup: Setup) -> Settings:
    """Return the settings of a recipe by its name or file."""
    return settings_of(recipe_config(recipe), setup)
