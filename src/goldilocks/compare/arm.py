"""One run of a study: a recipe, its settings, and a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from goldilocks.compare.equal_cost import EqualCost
from goldilocks.compare.grid import Settings

VALIDATIONS = 10  # by cost and not by updates: at equal rollouts one recipe makes ten times the updates of another
ENDLESS = 1_000_000  # steps and epochs: the budget is what ends an arm
SEEDS = (
    "data.seed",  # the order of the prompts, and every draw of a policy
    "actor_rollout_ref.rollout.seed",
    "actor_rollout_ref.actor.data_loader_seed",
    "critic.data_loader_seed",
)
STEPS, EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"


@dataclass(frozen=True)
class Arm:
    """``name`` is its folder; ``settings`` are the values it has of the grid."""

    name: str
    recipe: str
    seed: int
    settings: Settings
    cost: EqualCost

    @property
    def words(self) -> list[str]:
        """What makes the recipe this arm; the user's own words come after, the grid's values last."""
        return [
            f"{STEPS}={ENDLESS}",
            f"{EPOCHS}={ENDLESS}",
            "trainer.val_before_train=True",
            f"goldilocks.budget.{self.cost.kind}={self.cost.amount}",
            f"goldilocks.budget.validations={VALIDATIONS}",
            *(f"{key}={self.seed}" for key in SEEDS),
        ]

    def command(self, overrides: Sequence[str]) -> list[str]:
        """The words of ``goldilocks train`` that run it."""
        return [self.recipe, *self.words, *overrides, *(f"{key}={value}" for key, value in self.settings.items())]
