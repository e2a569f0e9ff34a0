"""A budget for a run, and a meter of what is spent.

verl ends a run after a number of updates. A budget ends it at the first update that has reached a cost. Every rollout
is charged, also dropped, cancelled and failed ones. Minutes are those of the updates (``timing_s/step``), without the
start and without validation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from goldilocks.core import Accounts
from goldilocks.errors import require
from goldilocks.runs.costs import COST_NAMES


@dataclass(frozen=True)
class Budget:
    """``goldilocks.budget``. If several costs are set, the first one reached ends the run."""

    rollouts: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    validations: int | None = None  # spread evenly over the cost, in the place of trainer.test_freq

    def __post_init__(self) -> None:
        for cost, amount in self.costs.items():
            number = isinstance(amount, (int, float)) and math.isfinite(amount) and amount > 0
            require(number, f"goldilocks.budget.{cost}", amount, "a number above 0, or null")
        if self.validations is not None:
            key, count = "goldilocks.budget.validations", self.validations
            require(isinstance(count, int) and count >= 1, key, count, "1 or more, or null")
            require(bool(self.costs), key, count, f"null without a budget of {', '.join(COST_NAMES)}")

    @property
    def costs(self) -> dict[str, float]:
        """Return the costs that are bounded; a run without a budget has none."""
        amounts = {cost: getattr(self, cost) for cost in COST_NAMES}
        return {cost: amount for cost, amount in amounts.items() if amount is not None}

    def share(self, spent: Mapping[str, float]) -> float:
        """Return the share of the budget that is spent; 1 or more is all of it."""
        return max((spent[cost] / amount for cost, amount in self.costs.items()), default=0.0)


class Meter:
    """Measures a run against its budget; its counts survive a restart."""

    def __init__(self, budget: Budget, accounts: Accounts) -> None:
        self.budget = budget
        self._accounts = accounts
        self._seconds = 0.0  # of the updates before this one
        self._began: float | None = None
        self._validated = 0  # how many of the evenly spread validations have been due

    def begin_update(self) -> None:
        self._began = time.monotonic()

    def end_update(self) -> None:
        self._seconds, self._began = self.seconds, None

    @property
    def seconds(self) -> float:
        """Return the seconds spent on updates, the current one included."""
        return self._seconds + (0.0 if self._began is None else time.monotonic() - self._began)

    @property
    def share(self) -> float:
        """Return the share of the budget that is spent."""
        spent = {
            "rollouts": self._accounts.generated_rollouts,
            "tokens": self._accounts.generated_tokens,
            "minutes": self.seconds / 60,
        }
        return self.budget.share(spent)

    def validation_due(self) -> bool:
        """Return whether another of the evenly spread validations is due; true once for each."""
        before, self._validated = self._validated, math.floor(self.share * (self.budget.validations or 0))
        return self._validated > before

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "validated": self._validated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seconds, self._validated = state.get("seconds", 0.0), state.get("validated", 0)
