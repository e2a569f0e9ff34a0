"""One run of a study: a recipe with the tuned values, a seed, and the cost it may spend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from goldilocks.compare import units
from goldilocks.compare.grid import Values
from goldilocks.runs.costs import COST_NAMES

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
        if kind not in COST_NAMES or not math.isfinite(amount) or amount <= 0:
            accepted = ", ".join(f"{cost}=N" for cost in COST_NAMES[:-1])
            raise ValueError(f"{option}={word!r} is not accepted: {accepted} or {COST_NAMES[-1]}=N, with N above 0")
        return cls(kind, amount)

    def __str__(self) -> str:
        return f"{self.amount:,g} {self.kind}" if self.kind not in WHOLE else f"{self.amount:,} {self.kind}"


@dataclass(frozen=True)
class Arm:
    """``name`` is its folder; ``settings`` are its values of the tuned keys."""

    name: str
    recipe: str
    seed: int
    settings: Values
    cost: EqualCost

    @property
    def words(self) -> list[str]:
        """Return the settings that every arm has; the user's own words come after them, the tuned values last."""
        return [
            f"{STEPS}={ENDLESS}",
            f"{EPOCHS}={ENDLESS}",
            "trainer.val_before_train=True",
            f"goldilocks.budget.{self.cost.kind}={self.cost.amount}",
            f"goldilocks.budget.validations={VALIDATIONS}",
            "goldilocks.study=True",
            *(f"{key}={self.seed}" for key in SEEDS),
        ]

    def command(self, overrides: Sequence[str]) -> list[str]:
        """Return the words of ``goldilocks train`` that run the arm."""
        return [self.recipe, *self.words, *overrides, *units.words(self.recipe, self.settings, overrides)]
