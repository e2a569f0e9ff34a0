"""How large a share of groups survives the filter: what a refill is sized by.

Before anything has been judged, ``gen_batch_size`` says what the user expects: 1,536 prompts for 512 groups is a keep
rate of a third, and the first wave is then exactly one generation batch.
"""

from __future__ import annotations

from typing import Any

PRIOR_WEIGHT = 4.0  # groups' worth of belief in the user's expectation
FORGETTING = 0.9  # per step: the policy moves, and the rate with it


class KeepRate:
    """A running estimate in (0, 1]."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._kept = 0.0
        self._judged = 0.0

    @property
    def value(self) -> float:
        return (self._kept + PRIOR_WEIGHT * self._prior) / (self._judged + PRIOR_WEIGHT)

    def observe(self, kept: bool) -> None:
        self._judged += 1
        self._kept += kept

    def take_back(self) -> None:
        """A group that was kept has been rejected after the fact: the next refill asks for more."""
        self._kept = max(self._kept - 1, 0.0)

    def forget(self) -> None:
        """A step has passed."""
        self._judged *= FORGETTING
        self._kept *= FORGETTING

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._kept, "judged": self._judged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept, self._judged = float(state["kept"]), float(state["judged"])
