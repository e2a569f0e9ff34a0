"""Is a forecast better than knowing nothing of the prompt but the mean of all?

Both are scored by the log-loss of what came out, on prompts that neither had seen, over the last few hundred groups.
The forecast is better if it saves more than two standard errors of the sum: more than chance would.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MEMORY = 512  # groups: what lies further back counts for less and less
ENOUGH = 64  # groups before the score says anything
DEVIATIONS = 2.0
EDGE = 0.01  # no forecast is surer than this


@dataclass
class ForecastScore:
    """Decayed sums over groups; ``groups`` counts them all."""

    forecast_loss: float = 0.0
    mean_loss: float = 0.0
    squares: float = 0.0  # of the differences of the two losses, group by group
    passes: float = 1.0  # one pass and one failure before anything was seen
    trials: float = 2.0
    groups: int = 0

    @property
    def better(self) -> bool:
        """Whether enough groups were scored and the forecast's loss is below the mean's beyond chance."""
        return self.groups >= ENOUGH and self.mean_loss - self.forecast_loss > DEVIATIONS * math.sqrt(self.squares)

    @property
    def skill(self) -> float:
        """The share of the mean's loss that the forecast saves; 0 or less: it is no better."""
        return 1 - self.forecast_loss / self.mean_loss if self.mean_loss else 0.0

    def add(self, forecasts: np.ndarray, passes: np.ndarray, trials: np.ndarray) -> None:
        """Groups came in together whose pass rates had been forecast; neither forecast nor mean has seen them."""
        mean = self.passes / self.trials
        for forecast, right, of in zip(forecasts.tolist(), passes.tolist(), trials.tolist(), strict=True):
            self._add(log_loss(forecast, right / of), log_loss(mean, right / of), right, of)

    def _add(self, forecast_loss: float, mean_loss: float, passes: float, trials: float) -> None:
        kept = 1 - 1 / MEMORY
        self.forecast_loss = kept * self.forecast_loss + forecast_loss
        self.mean_loss = kept * self.mean_loss + mean_loss
        self.squares = kept * self.squares + (mean_loss - forecast_loss) ** 2
        self.passes, self.trials = kept * self.passes + passes, kept * self.trials + trials
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
