"""The protocol of a selector."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from goldilocks.core.ledger import Ledger
from goldilocks.core.policy import Policy
from goldilocks.core.pool import Pool
from goldilocks.types import Group


class Selector(Policy):
    """Chooses prompts, a generation batch at a time."""

    needs_features: ClassVar[bool] = False  # whether ``use_features`` must be called before the first choice

    @abstractmethod
    def choose(self, pool: Pool, ledger: Ledger, k: int, rng: np.random.Generator) -> np.ndarray:
        """At most ``k`` indices: from ``pool.next``, the shuffled pass, or from ``pool.free``, all not in hand.

        Fewer than ``k``, even none, says that there are no more for now.
        """

    def use_features(self, features: np.ndarray) -> None:
        """Take a matrix with a row for each prompt of the source, in the source's order."""

    def learn(self, group: Group, *, informative: bool) -> None:
        """Told of every group when it is judged; ``informative``: its rewards differed."""

    def learn_unjudged(self, group: Group) -> None:
        """Told of every group that is given up before it is judged, with the rollouts it has had."""
