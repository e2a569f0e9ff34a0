"""A prompt never tried is believed to be like the prompts it resembles.

Prompts stand in a tree: all prompts, coarse strata, finer ones, the prompt itself. The rate of each node is
Beta-distributed around the rate of the node above it. The concentration of each depth is estimated from how much the
nodes of that depth differ beyond chance (beta-binomial, method of moments); that of the prompts around their stratum is
``worth``. Strata that say nothing have prompts that differ as much within them as between them: their ``worth`` is
small, and their rates are those of all.

Everything is a function of the ledger's counts, so there is no state to save. It costs a few passes over the prompts
that were visited, once for a choice of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from goldilocks.core.priors.base import Counts, Prior
from goldilocks.errors import require

WORTHS = (1.0, 64.0)  # rollouts that a stratum counts as for one of its prompts, at least and at most
LEANING = (1.0, 1024.0)  # rollouts that the node above counts as for a stratum
GUESS = 0.25  # correlation of two rollouts of one node, before anything is known
GUESS_WEIGHT = 0.1  # of the guess, in units of Σ μ(1 − μ) over nodes
NOTHING = 0.5  # passes and failures before anything is known
PASSES = 3  # means need concentrations and concentrations need means: alternate
TINY = 1e-3  # no parameter of a Beta is less


@dataclass(frozen=True)
class Depth:
    """The nodes of one depth: the node above each, and what was seen of each, in effective rollouts."""

    parent: np.ndarray
    passes: np.ndarray
    trials: np.ndarray
    concentration: float

    def beta(self, above: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The posterior of each node's rate, given the rates of the nodes above."""
        prior = self.concentration * above[self.parent]
        a, b = prior + self.passes, self.concentration - prior + self.trials - self.passes
        return np.maximum(a, TINY), np.maximum(b, TINY)


class Strata(Prior):
    """``strata``: for each depth, the coarsest first, the stratum of each prompt, within one of the depth above."""

    def __init__(self, strata: Sequence[np.ndarray], *, forgetting: float = 0.98) -> None:
        require(0 < forgetting <= 1, "goldilocks.strata.forgetting", forgetting, "what an update leaves, in (0, 1]")
        self.forgetting = forgetting
        codes = [np.unique(one, return_inverse=True)[1].astype(np.int64) for one in strata]
        above = [np.zeros_like(codes[0]), *codes[:-1]]
        self._leaf = codes[-1]
        self._parents = [_parents(one, parent) for one, parent in zip(codes, above, strict=True)]
        nothing = [np.zeros(len(parents)) for parents in self._parents]
        self._depths = [Depth(p, z, z, 1 / GUESS - 1) for p, z in zip(self._parents, nothing, strict=True)]
        self._all = (NOTHING, NOTHING)
        self.worth = 1 / GUESS - 1

    # -- reading -------------------------------------------------------------------------------------------------------

    def mean(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rates = np.array([self._all[0] / sum(self._all)])
        for depth in self._depths:
            a, b = depth.beta(rates)
            rates = a / (a + b)
        return self._counts(rates, rows)

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Each stratum's rate is drawn once: it is explored as a whole."""
        rates = np.array([rng.beta(*self._all)])
        for depth in self._depths:
            rates = rng.beta(*depth.beta(rates))
        return self._counts(rates, rows)

    def _counts(self, rates: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        right = np.clip(self.worth * rates, TINY, self.worth - TINY).astype(np.float32)[self._leaf[rows]]
        return right, np.float32(self.worth) - right

    # -- learning ------------------------------------------------------------------------------------------------------

    def catch_up(self, counts: Counts) -> None:
        rows = np.flatnonzero(counts.visits)
        passes = counts.positives[rows].astype(np.float64)
        trials = passes + counts.negatives[rows]
        fresh = self.forgetting ** (counts.now - counts.last_step[rows].astype(np.float64))
        units = Units(passes / trials, trials, fresh, self._leaf[rows])
        self.worth, passes, trials = units.gathered(len(self._parents[-1]), WORTHS)
        depths = []
        for parents in reversed(self._parents):
            seen = trials > 0
            units = Units(passes[seen] / trials[seen], trials[seen], np.ones(seen.sum()), parents[seen])
            concentration, above_passes, above_trials = units.gathered(int(parents.max()) + 1, LEANING)
            depths.append(Depth(parents, passes, trials, concentration))
            passes, trials = above_passes, above_trials
        self._depths = depths[::-1]
        self._all = (NOTHING + passes[0], NOTHING + trials[0] - passes[0])

    def metrics(self) -> dict[str, float]:
        return {"belief/strata": float(len(self._parents[-1])), "belief/worth": self.worth}


@dataclass(frozen=True)
class Units:
    """Nodes with their observed rates, the trials behind each, how fresh they are, and the node above each."""

    rate: np.ndarray
    trials: np.ndarray
    fresh: np.ndarray
    parent: np.ndarray

    def gathered(self, nodes: int, bounds: tuple[float, float]) -> tuple[float, np.ndarray, np.ndarray]:
        """The concentration of these around the nodes above, and the effective passes and trials of each node above.

        Trials of one unit are alike: n of them count as n(κ + 1) / (κ + n) trials of the node above.
        """
        concentration = 1 / GUESS - 1
        for _ in range(PASSES):
            effective = self._effective(concentration)
            trials = np.bincount(self.parent, effective, nodes)
            passes = np.bincount(self.parent, effective * self.rate, nodes)
            concentration = self._concentration(concentration, passes, trials, bounds)
        return concentration, passes, trials

    def _effective(self, concentration: float) -> np.ndarray:
        return np.asarray(self.fresh * self.trials * (concentration + 1) / (concentration + self.trials))

    def _concentration(
        self, before: float, passes: np.ndarray, trials: np.ndarray, bounds: tuple[float, float]
    ) -> float:
        """E(r − μ)² = μ(1 − μ)(1/n + ρ(1 − 1/n)) for n trials of a unit, and ρ = 1 / (concentration + 1)."""
        effective = self._effective(before)
        weight = (effective / (before + 1)) ** 2
        mean = (passes / np.maximum(trials, TINY))[self.parent]
        others = 1 - effective / np.maximum(trials, TINY)[self.parent]  # the share of a mean that is not the unit's own
        weight = np.where(others > TINY, weight, 0)
        beyond = (self.rate - mean) ** 2 / np.maximum(others, TINY) - mean * (1 - mean) / self.trials
        expected = mean * (1 - mean) * (1 - 1 / np.maximum(self.trials, 1))
        correlation = (weight @ beyond + GUESS_WEIGHT * GUESS) / (weight @ expected + GUESS_WEIGHT)
        low, high = bounds
        return float(np.clip(1 / max(correlation, TINY**2) - 1, low, high))


def _parents(codes: np.ndarray, above: np.ndarray) -> np.ndarray:
    """The node above each stratum."""
    parents = np.zeros(int(codes.max(initial=0)) + 1, dtype=np.int64)
    parents[codes] = above
    require(bool((parents[codes] == above).all()), "strata", "not nested", "each stratum within one of the depth above")
    return parents
