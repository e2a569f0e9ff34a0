"""A guard for old weights: the rollout engine's log-probs of fresh rows beside the trainer's.

Both sides compute the same log-probs of a row that the newest weights wrote, up to rounding. An engine that did not get
the newest weights, or got them without an adapter, still generates, and its rewards still look sound; the mean of
|log π − log π of the engine| over the tokens of fresh rows shows it. Both log-probs are there anyway.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

ERROR = "error"  # of goldilocks.on_stale_weights
IN_A_ROW = 2  # updates beyond the limit before the guard speaks
GROWTH = 4.0  # the limit, in smallest gaps that the run has seen
# What rounding explains: a gap below the first is always sound, one above the second never is.
FP32, HALF = (1e-3, 0.05), (0.02, 0.2)


class StaleWeights(RuntimeError):
    """The rollout engine does not sample from the policy that is trained."""


class WeightsGuard:
    """Judges the gap of one update after another. It speaks once in a run."""

    def __init__(self, action: str, *, exact: bool, judges: bool = True) -> None:
        """``exact``: both sides compute in fp32. ``judges``: there is no reason other than old weights for a gap."""
        self._action = action
        self._bounds = FP32 if exact else HALF
        self._judges = judges
        self._smallest = math.inf
        self._beyond: list[float] = []  # the gaps of the last updates, while they are beyond the limit

    @property
    def limit(self) -> float:
        """The largest gap that the precision explains."""
        lowest, highest = self._bounds
        return min(max(GROWTH * self._smallest, lowest), highest)

    def observe(self, gap: float | None) -> dict[str, float]:
        """Return the metric of an update; ``gap`` is None where no row was fresh. Raises if the user asked for it."""
        if gap is None:
            return {}
        if self._judges:
            self._judge(gap)
        return {"rollout/weights_gap": gap}

    def _judge(self, gap: float) -> None:
        if gap <= self.limit:
            self._beyond = []
            self._smallest = min(self._smallest, gap)
            return
        self._beyond.append(gap)  # a NaN is beyond any limit
        if len(self._beyond) == IN_A_ROW:
            message = self._message()
            if self._action == ERROR:
                raise StaleWeights(message)
            self._judges = False
            logger.warning("%s. goldilocks.on_stale_weights=error ends a run here", message)

    def _message(self) -> str:
        gaps = " and ".join(f"{gap:.2g}" for gap in self._beyond)
        if self._smallest < math.inf:
            cause = f"It was {self._smallest:.2g} before, so most likely the engine has older weights"
        else:
            cause = "It was so from the start, so most likely the engine has another model, precision or adapter"
        return (
            f"rollout/weights_gap is {gaps} in {IN_A_ROW} updates in a row, where the precision explains "
            f"{self.limit:.2g}: the rollout engine does not sample from the policy that is trained. {cause}"
        )


def gap_sums(trained: Tensor, sampled: Tensor, fresh: Tensor) -> Tensor:
    """Return [sum of gaps, number of tokens] over the tokens that ``fresh`` marks; all three have one shape."""
    apart = torch.where(fresh, (trained.float() - sampled.float()).abs(), 0.0)
    return torch.stack([apart.sum(dtype=torch.float64), fresh.sum().double()])


def mean_gap(sums: Sequence[float]) -> float | None:
    """Return the mean gap of ``gap_sums``; None where there was no token."""
    total, tokens = sums
    return total / tokens if tokens else None
