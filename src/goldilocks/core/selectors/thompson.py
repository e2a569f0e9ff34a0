"""Draws each prompt's pass rate from its posterior and takes the prompts nearest the target.

Uncertain prompts draw widely and are tried now and then; prompts known to be always right or always wrong are not.
A share of every choice is the next of the shuffled pass, so that no belief goes untested; the ledger scores beliefs on
these.
No prompt is chosen while it is in hand: a batch needs at least as many prompts with signal as it has groups. Of a very
large data set a fresh random ``window`` is drawn for: the nearest thousand of a quarter million are near enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from goldilocks.core.ledger import Ledger
from goldilocks.core.pool import Pool
from goldilocks.core.selectors.base import Selector
from goldilocks.errors import require


@dataclass
class Thompson(Selector):
    """Thompson sampling on the distance to a pass rate of ``target``."""

    target: float = 0.5
    explore: float = 0.1
    window: int = 262_144

    def __post_init__(self) -> None:
        require(0 < self.target < 1, "selector.target", self.target, "a pass rate in (0, 1)")
        require(0 <= self.explore <= 1, "selector.explore", self.explore, "a share of uniform draws in [0, 1]")
        require(self.window >= 1, "selector.window", self.window, "1 or more prompts")

    def choose(self, pool: Pool, ledger: Ledger, k: int, rng: np.random.Generator) -> np.ndarray:
        rows = pool.free()
        # Rounded up as often as the fraction says: a tenth of a choice of four is one prompt in two choices of five.
        probes = np.intersect1d(pool.next(int(self.explore * k + rng.random())), rows)
        window = max(self.window, k)
        if len(rows) > window:
            rows = rng.choice(rows, window, replace=False, shuffle=False)
        rest = rows[~np.isin(rows, probes)]
        return np.concatenate([ledger.probe(probes), self._nearest(rest, ledger, k - len(probes), rng)])

    def _nearest(self, rows: np.ndarray, ledger: Ledger, k: int, rng: np.random.Generator) -> np.ndarray:
        distance = np.abs(ledger.draw(rows, rng) - np.float32(self.target))
        if len(rows) > k:
            nearest = np.argpartition(distance, k)[:k]
            rows, distance = rows[nearest], distance[nearest]
        return np.asarray(rows[np.argsort(distance, kind="stable")])
