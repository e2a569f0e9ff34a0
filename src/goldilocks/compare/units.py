"""``groups_per_update``: the batch size of a grid, in a unit that every recipe has.

A batch of 16 prompts is one update with every recipe, and costs GRPO 128 rollouts. A recipe that drops groups without
variance generates until 16 informative ones are there, which may cost 900. ``groups_per_update=G`` gives every update
of every recipe G fresh groups. Where groups are dropped, all of them are informative; where they are not, the share
that the data have. The table prints what an update cost and how many informative groups it trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

from goldilocks.compare.grid import Values
from goldilocks.errors import require
from goldilocks.nested import value_at, with_value
from goldilocks.recipes import read_recipe

GROUPS = "groups_per_update"
BATCH, MINI_BATCH, GENERATED = (
    "data.train_batch_size",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "data.gen_batch_size",
)
LIMIT = "algorithm.filter_groups.max_num_gen_batches"
FILTERS = ("algorithm.filter_groups.enable", "goldilocks.filter", "batch_filter.enable")
OVERSAMPLING = "batch_filter.prompt_oversampling_factor"  # another way to say gen_batch_size

# Where groups are dropped, prompts that are rolled out at a time for each group wanted. One, the default, generates a
# small batch in many small rounds. With many more, a round keeps more groups than two updates can train.
PROMPTS_PER_GROUP = 4
# A recipe's limit on rounds is for batches of dozens of groups. How many prompts a few groups take varies far more.
ROUNDS = 10


def words(recipe: str, settings: Values, overrides: Sequence[str]) -> list[str]:
    """Return the tuned values as overrides, with ``groups_per_update`` in the keys that it stands for."""
    plain = [f"{key}={value}" for key, value in settings.items() if key != GROUPS]
    if GROUPS not in settings:
        return plain
    groups = _whole(settings[GROUPS])
    config = _config(recipe, [*overrides, *plain])
    return [*_sizes(groups, config), *plain]


def _sizes(groups: int, config: Mapping[str, object]) -> list[str]:
    """Return the sizes of a batch. One that the words or the recipe name stays, and is cut into mini-batches."""
    batch = value_at(config, BATCH)
    if isinstance(batch, int):
        require(batch % groups == 0, GROUPS, groups, f"a divisor of {BATCH}={batch}")
        return [f"{MINI_BATCH}={groups}"]
    drops = any(value_at(config, key) for key in FILTERS)
    return [f"{BATCH}={groups}", f"{MINI_BATCH}={groups}", *(_rounds(groups, config) if drops else [])]


def _rounds(groups: int, config: Mapping[str, object]) -> list[str]:
    """Return the size of a generation batch and the limit on their number, unless the words name the size."""
    if value_at(config, GENERATED) is not None or value_at(config, OVERSAMPLING) not in (None, 1):
        return []
    limit = value_at(config, LIMIT) or 0
    return [f"{GENERATED}={groups * PROMPTS_PER_GROUP}", *([f"{LIMIT}={limit * ROUNDS}"] if limit > 0 else [])]


def _config(recipe: str, overrides: Iterable[str]) -> dict[str, object]:
    """Return the keys that a recipe and the overrides set. Hydra composes the rest, which no size depends on."""
    config = read_recipe(recipe)
    parser = OverridesParser.create()
    for word in overrides:
        override = parser.parse_override(word)
        config = with_value(config, override.key_or_group, override.value())
    return config


def _whole(text: str) -> int:
    groups = int(text) if text.isdecimal() else 0
    require(groups >= 1, f"--tune {GROUPS}", text, "whole numbers above 0")
    return groups
