"""Where the belief about a prompt begins: the Beta that a prompt has before any rollout of its own.

Beliefs add a prompt's own rollouts to it. Selectors and allocators read the sum, and never ask for its origin.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from goldilocks.core.policy import Policy
from goldilocks.types import Prompt


class Counts(Protocol):
    """What a prior may learn from: the beliefs' columns, a row per prompt, and the last update it was told of."""

    keys: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray
    visits: np.ndarray
    drawn_step: np.ndarray  # of the last visit that was not owed to the prompt's own rollouts
    now: int


class Prior(Policy):
    """A Beta for each prompt. Its two parameters together count as so many rollouts of the prompt."""

    @abstractmethod
    def mean(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The expected Beta of each prompt: passes and failures."""

    @abstractmethod
    def overall(self) -> float:
        """The expected pass rate of a prompt of which nothing is known."""

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The same by one draw of what prompts share, the same draw for every prompt that shares it."""
        return self.mean(rows)

    def observe(self, prompt: Prompt, passes: int, trials: int, version: int, *, fair: bool) -> None:
        """Told of every group, also of one that is given up before it is judged; ``version`` of the policy wrote it.

        ``fair``: the visit was the prompt's first or a uniform draw, and so not owed to the prompt's own rollouts.
        """

    def tell(self, rates: Mapping[str, float]) -> None:
        """Told of pass rates that a validation measured, by their names; only an oracle listens."""

    def catch_up(self, counts: Counts) -> None:
        """Learn what was told since. Called before beliefs are read, and never twice for the same news."""


class Flat(Prior):
    """Anything is as likely: Beta(1, 1)."""

    def mean(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ones = np.ones(len(rows), dtype=np.float32)
        return ones, ones

    def overall(self) -> float:
        return 0.5
