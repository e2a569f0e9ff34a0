"""A stand-in for the trained model: a pass rate for each prompt.

Every trained group whose rewards differ multiplies the odds of its own prompt by e^improvement, and the odds of all by
e^(improvement / prompts): half of what is learnt is about the prompt, half is about the task. Impossible prompts stay
impossible, and trivial ones trivial.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from goldilocks.core.informative import is_informative
from goldilocks.errors import require
from goldilocks.types import Group


class Learner:
    """Pass rates that stand still (``improvement=0``) or rise with every informative group."""

    def __init__(self, pass_rate: np.ndarray, *, improvement: float = 0.0) -> None:
        fits = math.isfinite(improvement) and 0 <= improvement <= 100
        require(fits, "improvement", improvement, "a gain in log-odds a group, from 0 to 100")
        self._step = improvement
        self._initial = pass_rate.tolist()
        self._gain = [0.0] * len(pass_rate)  # in log-odds, beyond the gain common to all prompts
        self._common = 0.0

    def pass_rate(self, index: int) -> float:
        """The chance that an answer to this prompt is right, now."""
        p, gain = self._initial[index], self._gain[index] + self._common
        if not gain or p in (0.0, 1.0):
            return float(p)
        return float(1 / (1 + (1 - p) / p * math.exp(-gain)))

    def train(self, batch: Iterable[Group]) -> None:
        """One update."""
        for group in batch:
            if is_informative(group):
                self._gain[group.prompt.index] += self._step
                self._common += self._step / len(self._gain)

    @property
    def mean_pass_rate(self) -> float:
        return math.fsum(map(self.pass_rate, range(len(self._gain)))) / len(self._gain)
