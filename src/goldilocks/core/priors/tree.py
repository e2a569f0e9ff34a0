"""Prompts in a tree: all prompts, coarse strata, finer ones, the prompt itself.

The rate of each node is Beta-distributed around the rate of the node above it. The concentration of each depth is
estimated from how much the nodes of that depth differ beyond chance (beta-binomial, method of moments).

A fit is a function of the counts alone. It costs a few passes over the prompts that were visited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from goldilocks.errors import require

CONCENTRATIONS = (0.05, 1024.0)  # rollouts that a node counts as for one below it, at least and at most
FORGOTTEN = 1e-9  # trials: of so few nothing is learnt, and in the end there would be no number for them
GUESS = 0.25  # correlation of two rollouts of one node, before anything is known
GUESS_WEIGHT = 0.1  # of the guess, in units of Σ μ(1 − μ) over nodes
NOTHING = 0.5  # passes and failures of all prompts before anything is known
PASSES = 3  # means need concentrations and concentrations need means: alternate
TINY = 1e-3  # no parameter of a Beta is less
UNKNOWN = 1 / GUESS - 1


@dataclass(frozen=True)
class Visited:
    """The prompts that were visited: their rows, pass rates, trials, and what updates have left of each, in (0, 1]."""

    rows: np.ndarray
    rate: np.ndarray
    trials: np.ndarray
    fresh: np.ndarray


@dataclass(frozen=True)
class Depth:
    """The nodes of one depth: the node above each, and what was seen of each, in effective trials."""

    parent: np.ndarray
    passes: np.ndarray
    trials: np.ndarray
    concentration: float

    def beta(self, above: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The posterior of each node's rate, given the rates of the nodes above."""
        prior = self.concentration * above[self.parent]
        a, b = prior + self.passes, self.concentration - prior + self.trials - self.passes
        return np.maximum(a, TINY), np.maximum(b, TINY)

    @property
    def handed_up(self) -> np.ndarray:
        """The share of each node's trials that counts for the node above: trials of one node are alike."""
        return np.asarray((self.concentration + 1) / (self.concentration + np.maximum(self.trials, 1)))


class Tree:
    """``strata``: for each depth, the coarsest first, the stratum of each prompt, within one of the depth above."""

    def __init__(self, strata: Sequence[np.ndarray]) -> None:
        codes = [np.unique(one, return_inverse=True)[1].astype(np.int64) for one in strata]
        above = [np.zeros_like(codes[0]), *codes[:-1]]
        self.leaf = codes[-1]
        self._sizes = np.bincount(self.leaf)
        self._parents = [_parents(one, parent) for one, parent in zip(codes, above, strict=True)]
        nothing = [np.zeros(len(parents)) for parents in self._parents]
        self._depths = [Depth(p, z, z, UNKNOWN) for p, z in zip(self._parents, nothing, strict=True)]
        self._all = (NOTHING, NOTHING)
        self.concentration = UNKNOWN  # of the prompts around their stratum

    def __len__(self) -> int:
        """The number of strata of the finest depth."""
        return len(self._parents[-1])

    def means(self) -> np.ndarray:
        """The expected rate of each stratum."""
        rates = np.array([self._all[0] / sum(self._all)])
        for depth in self._depths:
            a, b = depth.beta(rates)
            rates = a / (a + b)
        return rates

    def overall(self) -> float:
        """The expected rate of any prompt: each stratum by how many prompts it has."""
        return float(self.means() @ self._sizes / len(self.leaf))

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """A rate for each stratum, drawn from the top."""
        rates = np.array([rng.beta(*self._all)])
        for depth in self._depths:
            rates = rng.beta(*depth.beta(rates))
        return rates

    def fit(self, visited: Visited) -> None:
        """Find the means and concentrations of every depth, from the prompts upwards."""
        units = Units(visited.rate, visited.trials, visited.fresh, self.leaf[visited.rows])
        self.concentration, passes, trials = units.gathered(len(self))
        depths = []
        for parents in reversed(self._parents):
            seen = trials > FORGOTTEN
            units = Units(passes[seen] / trials[seen], trials[seen], np.ones(int(seen.sum())), parents[seen])
            concentration, above_passes, above_trials = units.gathered(int(parents.max()) + 1)
            depths.append(Depth(parents, passes, trials, concentration))
            passes, trials = above_passes, above_trials
        self._depths = depths[::-1]
        self._all = (NOTHING + passes[0], NOTHING + trials[0] - passes[0])

    def log_likelihood(self, visited: Visited, concentration: float) -> float:
        """How well the other prompts of the tree forecast each that was visited, in nats over effective trials.

        Trials of one prompt are as alike as ``concentration`` says, the same for all trees that are compared.
        """
        effective = visited.fresh * visited.trials * (concentration + 1) / (concentration + visited.trials)
        mean = np.clip(self._without_own(visited), 0.01, 0.99)
        return float(effective @ (visited.rate * np.log(mean) + (1 - visited.rate) * np.log(1 - mean)))

    def _without_own(self, visited: Visited) -> np.ndarray:
        """The expected rate of each visited prompt's stratum, had the prompt not been visited."""
        node = self.leaf[visited.rows]
        own = visited.fresh * visited.trials * (self.concentration + 1) / (self.concentration + visited.trials)
        path: list[tuple[np.ndarray, np.ndarray, float]] = []  # from the stratum up: passes, trials, concentration
        for depth in reversed(self._depths):
            trials = np.maximum(depth.trials[node] - own, 0)
            path.append((np.clip(depth.passes[node] - own * visited.rate, 0, trials), trials, depth.concentration))
            own = own * depth.handed_up[node]
            node = depth.parent[node]
        passes, failures = self._all
        mean = np.maximum(passes - own * visited.rate, NOTHING)
        mean = mean / (mean + np.maximum(failures - own * (1 - visited.rate), NOTHING))
        for passes, trials, concentration in reversed(path):
            mean = (passes + concentration * mean) / (trials + concentration)
        return np.asarray(mean)


@dataclass(frozen=True)
class Units:
    """Nodes with their observed rates, the trials behind each, how fresh they are, and the node above each."""

    rate: np.ndarray
    trials: np.ndarray
    fresh: np.ndarray
    parent: np.ndarray

    def gathered(self, nodes: int) -> tuple[float, np.ndarray, np.ndarray]:
        """The concentration of these around the nodes above, and the effective passes and trials of each node above.

        Trials of one unit are alike: n of them count as n(κ + 1) / (κ + n) trials of the node above.
        """
        concentration = UNKNOWN
        for _ in range(PASSES):
            effective = self._effective(concentration)
            trials = np.bincount(self.parent, effective, nodes)
            passes = np.bincount(self.parent, effective * self.rate, nodes)
            concentration = self._concentration(effective / (concentration + 1), effective, passes, trials)
        return concentration, passes, trials

    def _effective(self, concentration: float) -> np.ndarray:
        counted = np.maximum(self.trials, 1)  # forgetting leaves less than one trial of some
        return np.asarray(self.fresh * self.trials * (concentration + 1) / (concentration + counted))

    def _concentration(self, share: np.ndarray, effective: np.ndarray, passes: np.ndarray, trials: np.ndarray) -> float:
        """E(r − μ)² = μ(1 − μ)(1/n + ρ(1 − 1/n)) for n trials of a unit, and ρ = 1 / (concentration + 1)."""
        total = np.maximum(trials, TINY)[self.parent]
        mean = passes[self.parent] / total
        others = 1 - effective / total  # the share that is not the unit's own
        weight = np.where(others > TINY, share**2, 0)
        beyond = (self.rate - mean) ** 2 / np.maximum(others, TINY) - mean * (1 - mean) / self.trials
        expected = mean * (1 - mean) * (1 - 1 / np.maximum(self.trials, 1))
        correlation = (weight @ beyond + GUESS_WEIGHT * GUESS) / (weight @ expected + GUESS_WEIGHT)
        low, high = CONCENTRATIONS
        return float(np.clip(1 / max(correlation, TINY**2) - 1, low, high))


def _parents(codes: np.ndarray, above: np.ndarray) -> np.ndarray:
    """The node above each stratum."""
    parents = np.zeros(int(codes.max(initial=0)) + 1, dtype=np.int64)
    parents[codes] = above
    require(bool((parents[codes] == above).all()), "strata", "not nested", "each stratum within one of the depth above")
    return parents
