"""Are beliefs better than knowing nothing of the prompt but the mean of all?

Both are scored by the log-loss of what came out, over the last few hundred groups whose prompts were drawn uniformly:
prompts that are chosen are biased towards a pass rate of 0.5. Both forecasts are made when the prompt is drawn.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MEMORY = 512  # groups: what lies further back counts for less and less
EDGE = 0.01  # no belief is surer than this


@dataclass
class BeliefScore:
    """Decayed sums over groups; ``groups`` counts them all."""

    belief_loss: float = 0.0
    mean_loss: float = 0.0
    rates: float = 0.0
    weight: float = 0.0
    groups: int = 0

    def mean(self, believed: float) -> float:
        """The mean of all: as believed, and as uniform draws show. Where little is right, a few dozen draws are few."""
        return (self.rates + MEMORY * believed) / (self.weight + MEMORY)

    @property
    def skill(self) -> float:
        """The share of the mean's loss that beliefs save; 0 or less: they are no better."""
        return 1 - self.belief_loss / self.mean_loss if self.mean_loss else 0.0

    def add(self, belief: float, mean: float, passes: int, trials: int) -> None:
        """A group came in. ``belief`` and ``mean`` were the two forecasts of its pass rate."""
        kept = 1 - 1 / MEMORY
        self.belief_loss = kept * self.belief_loss + log_loss(belief, passes / trials)
        self.mean_loss = kept * self.mean_loss + log_loss(mean, passes / trials)
        self.rates, self.weight = kept * self.rates + passes / trials, kept * self.weight + 1
        self.groups += 1

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def log_loss(forecast: float, rate: float) -> float:
    """Per rollout, of a group with this pass rate."""
    p = float(np.clip(forecast, EDGE, 1 - EDGE))
    return float(-rate * np.log(p) - (1 - rate) * np.log(1 - p))
