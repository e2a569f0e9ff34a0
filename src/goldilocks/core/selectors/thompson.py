"""Draw each prompt's pass rate from what we believe of it; take those nearest the target.

Uncertain prompts draw widely and so get their turn; prompts known to be always right or always wrong do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from goldilocks.core.ledger import Ledger
from goldilocks.core.policy import require
from goldilocks.core.pool import Pool
from goldilocks.core.selectors.base import Selector


@dataclass
class Thompson(Selector):
    """Thompson sampling on the distance to a pass rate of ``target``."""

    target: float = 0.5

    def __post_init__(self) -> None:
        require(0 < self.target < 1, "selector.target", self.target, "a pass rate in (0, 1)")

    def choose(self, pool: Pool, ledger: Ledger, k: int, rng: np.random.Generator) -> np.ndarray:
        rows = pool.free()
        distance = np.abs(ledger.draw(rows, rng) - np.float32(self.target))
        if len(rows) > k:
            nearest = np.argpartition(distance, k)[:k]
            rows, distance = rows[nearest], distance[nearest]
        return np.asarray(rows[np.argsort(distance, kind="stable")])
