"""The cost at which arms are compared: so many rollouts, tokens or minutes for each."""

from __future__ import annotations

import math
from dataclasses import dataclass

from goldilocks.runs.budget import COSTS

WHOLE = ("rollouts", "tokens")


@dataclass(frozen=True)
class EqualCost:
    """``kind`` is one of ``COSTS``."""

    kind: str
    amount: float

    @classmethod
    def parse(cls, word: str, option: str) -> EqualCost:
        """From ``rollouts=20000``."""
        kind, _, text = word.partition("=")
        try:
            amount = int(text) if kind in WHOLE else float(text)
        except ValueError:
            amount = 0
        if kind not in COSTS or not math.isfinite(amount) or amount <= 0:
            accepted = ", ".join(f"{cost}=N" for cost in COSTS[:-1])
            raise ValueError(f"{option}={word!r} is not accepted: {accepted} or {COSTS[-1]}=N, with N above 0")
        return cls(kind, amount)

    def __str__(self) -> str:
        return f"{self.amount:,g} {self.kind}" if self.kind not in WHOLE else f"{self.amount:,} {self.kind}"
