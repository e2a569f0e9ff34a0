"""Chooses every prompt once per epoch, in shuffled order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from goldilocks.core.ledger import Ledger
from goldilocks.core.pool import Pool
from goldilocks.core.selectors.base import Selector


@dataclass
class Uniform(Selector):
    """The order of a shuffling data loader."""

    def choose(self, pool: Pool, ledger: Ledger, k: int, rng: np.random.Generator) -> np.ndarray:
        return ledger.probe(pool.next(k))
