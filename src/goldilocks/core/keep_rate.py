"""An estimate of the share of groups that survive the filter, by which a refill is sized.

Before anything has been judged, ``gen_batch_size`` says what the user expects: 1,536 prompts for 512 groups is a keep
rate of a third, and the first wave is then exactly one generation batch.
"""

from __future__ import annotations

import math
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

    def prompts_for(self, groups: int, *, deviations: float) -> int:
        """Return how many prompts to judge so that ``groups`` are kept, with so many standard deviations to spare.

        The number kept of m prompts has mean mp and variance mp(1 − p): solve mp − d·√(mp(1 − p)) = groups for m.
        """
        p = self.value
        spread = deviations / 2 * math.sqrt(p * (1 - p))
        return math.ceil(((spread + math.sqrt(spread**2 + p * groups)) / p) ** 2 - 1e-9)

    def observe(self, kept: bool) -> None:
        self._judged += 1
        self._kept += kept

    def take_back(self, groups: int) -> None:
        """Count groups that were kept as not kept: they were rejected, and the next refill asks for more."""
        self._kept = max(self._kept - groups, 0.0)

    def forget(self) -> None:
        """Forget a part of what was counted, at the end of a step."""
        self._judged *= FORGETTING
        self._kept *= FORGETTING

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._kept, "judged": self._judged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept, self._judged = float(state["kept"]), float(state["judged"])
