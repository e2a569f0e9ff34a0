"""An arm, one run of a study: a recipe with tuned values, a seed, and the cost it may spend.

Tuning tries a grid: values for some keys, the same for every recipe. ``groups_per_update`` is a key of the grid alone:
the batch size in a unit that every recipe has. A batch of 16 prompts is one update with every recipe and costs GRPO 128
rollouts, but a recipe that drops groups without variance may generate 900 for its 16 informative ones.
``groups_per_update=G`` gives every update of every recipe G fresh groups: where groups are dropped, all of them are
informative; where they are not, the share that the data have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from goldilocks.config.recipes import read_recipe
from goldilocks.dotted_keys import value_at, with_value
from goldilocks.errors import require
from goldilocks.runs.costs import BATCH, COST_NAMES, MINI_BATCH

# Spread over the cost, not over updates: at equal rollouts one recipe makes ten times the updates of another.
VALIDATIONS = 10
ENDLESS = 1_000_000  # steps and epochs: the budget ends an arm
SEEDS = (
    "data.seed",  # the order of the prompts, and every draw of a policy
    "actor_rollout_ref.rollout.seed",
    "actor_rollout_ref.actor.data_loader_seed",
    "critic.data_loader_seed",
)
STEPS, EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"
WHOLE = ("rollouts", "tokens")  # costs that are counted in whole numbers

GROUPS = "groups_per_update"
GENERATED = "data.gen_batch_size"
LIMIT = "algorithm.filter_groups.max_num_gen_batches"
SIZES = (GROUPS, BATCH, MINI_BATCH)  # whole numbers of groups; none is below 1
FILTERS = ("algorithm.filter_groups.enable", "goldilocks.filter", "batch_filter.enable")
OVERSAMPLING = "batch_filter.prompt_oversampling_factor"  # another way to say gen_batch_size

# Where groups are dropped, prompts that are rolled out at a time for each group wanted. One, the default, generates a
# small batch in many small rounds. With many more, a round keeps more groups than two updates can train.
PROMPTS_PER_GROUP = 4
# A recipe's limit on rounds is for batches of dozens of groups. How many prompts a few groups take varies far more.
ROUNDS = 10

Grid = Mapping[str, Sequence[str]]
Values = Mapping[str, str]


@dataclass(frozen=True)
class EqualCost:
    """The cost at which arms are compared; ``kind`` is one of ``COST_NAMES``."""

    kind: str
    amount: float

    @classmethod
    def parse(cls, word: str, option: str) -> EqualCost:
        """Parse ``rollouts=20000``."""
        kind, _, text = word.partition("=")
        try:
            amount = int(text) if kind in WHOLE else float(text)
        except ValueError:
            amount = 0
        accepted = f"{', '.join(f'{cost}=N' for cost in COST_NAMES[:-1])} or {COST_NAMES[-1]}=N, with N above 0"
        require(kind in COST_NAMES and math.isfinite(amount) and amount > 0, option, word, accepted)
        return cls(kind, amount)

    def __str__(self) -> str:
        return f"{self.amount:{',.0f' if self.kind in WHOLE or self.amount >= 100 else ',.3g'}} {self.kind}"


@dataclass(frozen=True)
class Arm:
    """``name`` is its folder; ``settings`` are its values of the tuned keys."""

    name: str
    recipe: str
    seed: int
    settings: Values
    cost: EqualCost

    def command(self, overrides: Sequence[str]) -> list[str]:
        """Return the words of ``goldilocks train`` that run the arm: what every arm has, overrides, tuned values."""
        return [
            self.recipe,
            f"{STEPS}={ENDLESS}",
            f"{EPOCHS}={ENDLESS}",
            "trainer.val_before_train=True",
            "trainer.save_freq=-1",  # an unfinished arm starts anew, and a checkpoint takes seconds of an update
            f"goldilocks.budget.{self.cost.kind}={self.cost.amount}",
            f"goldilocks.budget.validations={VALIDATIONS}",
            "goldilocks.study=True",
            *(f"{key}={self.seed}" for key in SEEDS),
            *overrides,
            *unit_words(self.recipe, self.settings, overrides),
        ]


def unit_words(recipe: str, settings: Values, overrides: Sequence[str]) -> list[str]:
    """Return the tuned values as overrides, with ``groups_per_update`` in the keys that it stands for.

    A batch size that the words or the recipe name stays, and is cut into mini-batches.
    """
    plain = [f"{key}={value}" for key, value in settings.items() if key != GROUPS]
    if GROUPS not in settings:
        return plain
    text = settings[GROUPS]
    groups = int(text) if text.isdecimal() else 0
    require(groups >= 1, f"--tune {GROUPS}", text, "whole numbers above 0")
    config = read_recipe(recipe)  # Hydra composes the rest, which no size depends on
    for word in (*overrides, *plain):
        override = OverridesParser.create().parse_override(word)
        config = with_value(config, override.key_or_group, override.value())
    batch = value_at(config, BATCH)
    if isinstance(batch, int):
        require(batch % groups == 0, GROUPS, groups, f"a divisor of {BATCH}={batch}")
        return [f"{MINI_BATCH}={groups}", *plain]
    sizes = [f"{BATCH}={groups}", f"{MINI_BATCH}={groups}"]
    sized = value_at(config, GENERATED) is not None or value_at(config, OVERSAMPLING) not in (None, 1)
    if any(value_at(config, key) for key in FILTERS) and not sized:
        sizes.append(f"{GENERATED}={groups * PROMPTS_PER_GROUP}")
        limit = value_at(config, LIMIT) or 0
        sizes += [f"{LIMIT}={limit * ROUNDS}"] if limit > 0 else []
    return [*sizes, *plain]


def parse_grid(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse ``key=value,value`` words, in Hydra's grammar for sweeps."""
    grid: dict[str, tuple[str, ...]] = {}
    for word in words:
        key, _, value = word.partition("=")
        require(bool(key and value), "--tune", word, "key=value,value; recipes stand before the options")
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise ValueError(f"--tune={word!r} is not accepted: {' '.join(str(error).split())}") from None
        values = tuple(override.sweep_string_iterator()) if override.is_sweep_override() else (value,)
        require(len(set(values)) == len(values), "--tune", word, "each value once")
        require(key not in grid, "--tune", word, f"all values of {key} at once: it is there already")
        grid[key] = values
    return grid


@dataclass(frozen=True)
class Edge:
    """A recipe's best value that is the lowest or the highest one tried: a better one may lie beyond it."""

    recipe: str
    key: str
    value: str
    side: str  # lowest or highest


def edges(grid: Grid, recipe: str, chosen: Values) -> list[Edge]:
    """Return the chosen values at an end of their list.

    Values that are not numbers have no order, and no end. Nothing lies below a size of one group.
    """
    found = []
    for key, values in grid.items():
        try:
            numbers = [float(value) for value in values]
        except ValueError:
            continue
        ends = {min(numbers): "lowest", max(numbers): "highest"}
        least = key in SIZES and float(chosen[key]) == 1
        side = None if least or len(values) < 2 else ends.get(float(chosen[key]))
        found += [Edge(recipe, key, chosen[key], side)] if side else []
    return found
