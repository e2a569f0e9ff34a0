"""Priors: the Beta that a prompt has before any rollout of its own. Beliefs add the prompt's rollouts to it.

``flat`` knows nothing. With ``strata`` and ``oracle`` a prompt never tried is believed to be like the prompts it
resembles.

Prompts stand in a tree: all prompts, coarse strata, finer ones, the prompt itself. The rate of each node is
Beta-distributed around the rate of the node above it. The concentration of each depth is estimated from how much the
nodes of that depth differ beyond chance (beta-binomial, method of moments). A fit is a function of the counts alone and
costs a few passes over the prompts that were visited.

Several trees may divide the prompts; one of them puts all prompts together. A tree's weight is how well its strata
forecast the prompts that were visited, each from the others. A stratum counts as ``worth`` rollouts of a prompt,
estimated from how much prompts of one stratum differ beyond chance. If strata say nothing, prompts differ as much
within them as between them: their ``worth`` is small, and their rates are the mean of all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from goldilocks.core.policy import Policy
from goldilocks.errors import require

PRIORS = ("flat", "strata", "oracle")
CONCENTRATIONS = (0.05, 1024.0)  # rollouts that a node counts as for one below it, at least and at most
FORGOTTEN = 1e-9  # trials: nodes with fewer are left out, before they underflow
GUESS = 0.25  # correlation of two rollouts of one node, before anything is known
GUESS_WEIGHT = 0.1  # of the guess, in units of Σ μ(1 − μ) over nodes
NOTHING = 0.5  # passes and failures of all prompts before anything is known
PASSES = 3  # means need concentrations and concentrations need means: alternate
TINY = 1e-3  # no parameter of a Beta is less
UNKNOWN = 1 / GUESS - 1
BENEFIT_OF_DOUBT = 3.0  # nats by which strata must forecast better than the mean of all to count for as much
MOST = 65_536  # prompts that strata are estimated from, those of the latest draws: a choice takes a tenth of a second
WORTHS = (1.0, 64.0)  # rollouts that a stratum counts as for one of its prompts, at least and at most


class Counts(Protocol):
    """What a prior may learn from: the columns of ``Beliefs``, a row per prompt, and the last recorded update."""

    positives: np.ndarray
    negatives: np.ndarray
    visits: np.ndarray
    drawn_step: np.ndarray  # of the last fair visit: first, or drawn uniformly
    now: int


class Prior(Policy):
    """A Beta for each prompt. The sum of its two parameters is how many rollouts of the prompt it counts as."""

    @abstractmethod
    def mean(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the expected Beta of each prompt: passes and failures."""

    @abstractmethod
    def overall(self) -> float:
        """Return the expected pass rate of any prompt."""

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the Beta of each prompt, given one draw of what prompts share."""
        return self.mean(rows)

    def tell(self, rates: Mapping[str, float]) -> None:
        """Take pass rates that a validation measured, by metric name; only ``Oracle`` uses them."""

    def catch_up(self, counts: Counts) -> None:
        """Learn from the counts. Called before beliefs are read, if a group was recorded since."""


class Flat(Prior):
    """Beta(1, 1): every pass rate is equally likely."""

    def mean(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ones = np.ones(len(rows), dtype=np.float32)
        return ones, ones

    def overall(self) -> float:
        return 0.5


@dataclass(frozen=True)
class Visited:
    """The prompts that were visited: their rows, pass rates, trials, and weights after forgetting, in (0, 1]."""

    rows: np.ndarray
    rate: np.ndarray
    trials: np.ndarray
    fresh: np.ndarray


@dataclass(frozen=True)
class Depth:
    """The nodes of one depth: the node above each, and its passes and trials, in effective trials."""

    parent: np.ndarray
    passes: np.ndarray
    trials: np.ndarray
    concentration: float

    def beta(self, above: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior of each node's rate, given the rates of the nodes above."""
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
        return len(self._parents[-1])

    @property
    def depths(self) -> int:
        return len(self._parents)

    def means(self) -> np.ndarray:
        rates = np.array([self._all[0] / sum(self._all)])
        for depth in self._depths:
            a, b = depth.beta(rates)
            rates = a / (a + b)
        return rates

    def overall(self) -> float:
        """Return the expected rate of any prompt: strata are weighed by how many prompts they have."""
        return float(self.means() @ self._sizes / len(self.leaf))

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Return a rate for each stratum, drawn from the top."""
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
        """Return how well the other prompts of the tree forecast each visited prompt, in nats over effective trials.

        Trials of one prompt are as alike as ``concentration`` says, the same for all trees that are compared.
        What a node adds to the node above counts by the share of its trials that are other prompts': two prompts that
        forecast each other are one thing learnt, not two.
        """
        effective = visited.fresh * visited.trials * (concentration + 1) / (concentration + visited.trials)
        total, above = np.zeros(len(visited.rows)), np.zeros(len(visited.rows))
        for mean, others in self._without_own(visited):
            clipped = np.clip(mean, 0.01, 0.99)
            here = visited.rate * np.log(clipped) + (1 - visited.rate) * np.log(1 - clipped)
            total, above = total + others * (here - above), here
        return float(effective @ total)

    def _without_own(self, visited: Visited) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield, from all prompts down to the stratum, the expected rate of each visited prompt's node without that
        prompt, and the share of the node's trials that are other prompts'.
        """
        node = self.leaf[visited.rows]
        own = visited.fresh * visited.trials * (self.concentration + 1) / (self.concentration + visited.trials)
        path: list[tuple[np.ndarray, np.ndarray, np.ndarray, float]] = []  # from the stratum up
        for depth in reversed(self._depths):
            trials = np.maximum(depth.trials[node] - own, 0)
            passes = np.clip(depth.passes[node] - own * visited.rate, 0, trials)
            path.append((passes, trials, trials / np.maximum(trials + own, FORGOTTEN), depth.concentration))
            own = own * depth.handed_up[node]
            node = depth.parent[node]
        passes, failures = self._all
        mean = np.maximum(passes - own * visited.rate, NOTHING)
        mean = mean / (mean + np.maximum(failures - own * (1 - visited.rate), NOTHING))
        yield mean, np.ones(len(mean))
        for passes, trials, others, concentration in reversed(path):
            mean = (passes + concentration * mean) / (trials + concentration)
            yield mean, others


@dataclass(frozen=True)
class Units:
    """Nodes with their observed rates, the trials behind each, how fresh they are, and the node above each."""

    rate: np.ndarray
    trials: np.ndarray
    fresh: np.ndarray
    parent: np.ndarray

    def gathered(self, nodes: int) -> tuple[float, np.ndarray, np.ndarray]:
        """Return the concentration around the nodes above, and the effective passes and trials of each node above.

        Trials of one unit are alike: n of them count as n(κ + 1) / (κ + n) trials of the node above.
        """
        concentration = UNKNOWN
        counted = np.maximum(self.trials, 1)  # forgetting leaves less than one trial of some
        for _ in range(PASSES):
            effective = self.fresh * self.trials * (concentration + 1) / (concentration + counted)
            trials = np.bincount(self.parent, effective, nodes)
            passes = np.bincount(self.parent, effective * self.rate, nodes)
            concentration = self._concentration(effective / (concentration + 1), effective, passes, trials)
        return concentration, passes, trials

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
        return float(min(max(1 / max(correlation, TINY**2) - 1, low), high))


def _parents(codes: np.ndarray, above: np.ndarray) -> np.ndarray:
    parents = np.zeros(int(codes.max(initial=0)) + 1, dtype=np.int64)
    parents[codes] = above
    require(bool((parents[codes] == above).all()), "strata", "not nested", "each stratum within one of the depth above")
    return parents


class Strata(Prior):
    """``trees``: each has, for each depth, the coarsest first, the stratum of each prompt.

    Everything is a function of the beliefs' counts, so there is no state to save.
    """

    def __init__(self, trees: Sequence[Sequence[np.ndarray]], *, forgetting: float = 0.98) -> None:
        accepted = "what an update leaves, in (0, 1]"
        require(0 < forgetting <= 1, "goldilocks.prior_kwargs.forgetting", forgetting, accepted)
        self.forgetting = forgetting
        everything = np.zeros_like(trees[0][0])
        self.trees = [Tree([everything]), *map(Tree, trees)]
        self.weights = np.full(len(self.trees), 1 / len(self.trees))

    def mean(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the weighted mean over the trees."""
        rates = sum(w * tree.means()[tree.leaf[rows]] for w, tree in zip(self.weights, self.trees, strict=True))
        return counts_of(np.asarray(rates), self.worth)

    def overall(self) -> float:
        return float(self.weights @ [tree.overall() for tree in self.trees])

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a tree by its weight, and one rate for each of its strata: a stratum is explored as a whole."""
        tree = self.trees[int(rng.choice(len(self.trees), p=self.weights))]
        return counts_of(tree.draw(rng)[tree.leaf[rows]], worth_of(tree))

    @property
    def worth(self) -> float:
        """The weighted mean over the trees."""
        return float(self.weights @ [worth_of(tree) for tree in self.trees])

    def catch_up(self, counts: Counts) -> None:
        rows = np.flatnonzero(counts.visits)
        if len(rows) > MOST:
            latest = np.argsort(counts.drawn_step[rows], kind="stable")[-MOST:]
            rows = rows[np.sort(latest)]
        passes = counts.positives[rows].astype(np.float64)
        trials = passes + counts.negatives[rows]
        # By fair visits: prompts with signal are visited again and again, and would otherwise outweigh the others.
        fresh = self.forgetting ** (counts.now - counts.drawn_step[rows].astype(np.float64))
        visited = Visited(rows, passes / trials, trials, fresh)
        for tree in self.trees:
            tree.fit(visited)
        alike = self.trees[0].concentration
        likelihoods = np.array([tree.log_likelihood(visited, alike) for tree in self.trees])
        likelihoods[0] += BENEFIT_OF_DOUBT + np.log(len(self.trees))  # the best of many trees may be best by chance
        likelihoods[1:] -= [tree.depths for tree in self.trees[1:]]  # AIC: a nat for each concentration that was fitted
        weights = np.exp(likelihoods - likelihoods.max())
        self.weights = weights / weights.sum()

    def metrics(self) -> dict[str, float]:
        best = self.trees[int(self.weights.argmax())]
        return {"belief/strata": float(len(best)), "belief/worth": self.worth}


class Oracle(Prior):
    """For studies: the pass rate of each stratum is measured outside the run, and costs the run nothing.

    What a run lacks against the oracle is its selector's fault. ``names``: for each prompt the metric that has its
    stratum's rate. Until a rate is known, visits estimate it.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, codes = np.unique(np.array(names), return_inverse=True)
        self._strata = Strata([[codes]])
        self._tree = self._strata.trees[1]
        self._told: dict[str, float] = {}

    def tell(self, rates: Mapping[str, float]) -> None:
        self._told.update({name: float(rates[name]) for name in self._names.tolist() if name in rates})

    def mean(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return counts_of(self._rates()[self._tree.leaf[rows]], worth_of(self._tree))

    def overall(self) -> float:
        return float(self._rates()[self._tree.leaf].mean())

    def _rates(self) -> np.ndarray:
        told = [self._told.get(name, np.nan) for name in self._names.tolist()]
        return np.where(np.isnan(told), self._tree.means(), told)

    def catch_up(self, counts: Counts) -> None:
        self._strata.catch_up(counts)

    def state_dict(self) -> dict[str, Any]:
        return {"told": dict(self._told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._told = dict(state.get("told", {}))

    def metrics(self) -> dict[str, float]:
        return {"belief/strata": float(len(self._names)), "belief/worth": worth_of(self._tree)}


def worth_of(tree: Tree) -> float:
    """Return how many rollouts a stratum of this tree counts as for one of its prompts."""
    low, high = WORTHS
    return min(max(tree.concentration, low), high)


def counts_of(rates: np.ndarray, worth: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the Beta that counts as ``worth`` rollouts at these rates: passes and failures."""
    right = np.clip(worth * rates, TINY, worth - TINY).astype(np.float32)
    return right, np.float32(worth) - right
