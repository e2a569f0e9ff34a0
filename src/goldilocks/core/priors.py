"""Priors: the Beta that a prompt has before any rollout of its own. Beliefs add the prompt's rollouts to it.

``flat`` knows nothing. ``strata`` believes that a prompt never tried is like the prompts it resembles. ``oracle`` is
told the rate of each stratum.

A tree divides the prompts: all prompts, coarse strata, finer strata, single prompts. The pass rate of a node is
Beta-distributed around the pass rate of the node above it. The concentration of each depth is estimated from how much
the nodes of that depth differ beyond chance (beta-binomial, method of moments). A fit depends on the counts alone and
takes a few passes over the visited prompts.

There may be several trees; one of them has a single stratum, all prompts. A tree is weighed by how well its strata
forecast each visited prompt from the others. A stratum counts as ``worth`` rollouts of a prompt, estimated from how
much prompts of one stratum differ beyond chance. If strata say nothing, prompts differ as much within strata as between
them: ``worth`` is small, and the rate of every stratum is the mean of all.
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
FORGOTTEN = 1e-9  # nodes with fewer trials are left out: divisions would underflow
GUESS = 0.25  # correlation of two rollouts of one node, before anything is known
GUESS_WEIGHT = 0.1  # weight of the guess, in units of Σ μ(1 − μ) over nodes
NOTHING = 0.5  # passes, and failures, that the mean of all begins with
PASSES = 3  # rounds in which means are estimated from concentrations, and concentrations from means
TINY = 1e-3  # the least parameter of a Beta
UNKNOWN = 1 / GUESS - 1  # the concentration that belongs to the guess
BENEFIT_OF_DOUBT = 3.0  # a tree must forecast this many nats better than the mean of all to weigh as much
MOST = 65_536  # strata are estimated from this many prompts, the latest drawn, so that a choice takes 0.1 s
WORTHS = (1.0, 64.0)  # rollouts that a stratum counts as for one of its prompts, at least and at most


class Counts(Protocol):
    """What a prior learns from: columns of ``Beliefs`` with a row per prompt, and the last recorded update."""

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
        """Take the pass rates that a validation measured, by metric name. Only ``Oracle`` uses them."""

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
    """The visited prompts: their rows, pass rates, trials, and the weights that forgetting leaves them, in (0, 1]."""

    rows: np.ndarray
    rate: np.ndarray
    trials: np.ndarray
    fresh: np.ndarray


@dataclass(frozen=True)
class Depth:
    """The nodes of one depth: the node above each, its passes and its trials, both in effective trials."""

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
        """The share of each node's trials that counts for the node above. Trials of one node are alike."""
        return np.asarray((self.concentration + 1) / (self.concentration + np.maximum(self.trials, 1)))


class Tree:
    """One division of the prompts into nested strata, with what is believed of each stratum.

    ``strata`` has an array for each depth, the coarsest first: the stratum of each prompt.
    """

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
        """Return the expected rate of each stratum."""
        rates = np.array([self._all[0] / sum(self._all)])
        for depth in self._depths:
            a, b = depth.beta(rates)
            rates = a / (a + b)
        return rates

    def overall(self) -> float:
        """Return the expected rate of any prompt: the mean over strata, weighed by their prompts."""
        return float(self.means() @ self._sizes / len(self.leaf))

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Return a rate for each stratum: draw the coarsest strata first, the finer ones around them."""
        rates = np.array([rng.beta(*self._all)])
        for depth in self._depths:
            rates = rng.beta(*depth.beta(rates))
        return rates

    def fit(self, visited: Visited) -> None:
        """Estimate the counts and the concentration of every depth, from the prompts upwards."""
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
        """Return the log-likelihood of the visited prompts, each forecast from the others, over effective trials.

        ``concentration`` says how alike trials of one prompt are, the same for all trees that are compared. What a
        node's forecast adds to that of the node above counts by the share of the node's trials that other prompts have.
        So two prompts that forecast each other count once.
        """
        effective = visited.fresh * visited.trials * (concentration + 1) / (concentration + visited.trials)
        total, above = np.zeros(len(visited.rows)), np.zeros(len(visited.rows))
        for mean, others in self._without_own(visited):
            clipped = np.clip(mean, 0.01, 0.99)
            here = visited.rate * np.log(clipped) + (1 - visited.rate) * np.log(1 - clipped)
            total, above = total + others * (here - above), here
        return float(effective @ total)

    def _without_own(self, visited: Visited) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield two arrays for each depth, from all prompts down to the strata, with an entry for each visited prompt:
        the expected rate of its node without the prompt itself, and the share of the node's trials that others have.
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
    """Nodes of one depth, or prompts: observed rates, trials, what forgetting leaves of them, and the nodes above."""

    rate: np.ndarray
    trials: np.ndarray
    fresh: np.ndarray
    parent: np.ndarray

    def gathered(self, nodes: int) -> tuple[float, np.ndarray, np.ndarray]:
        """Return the concentration κ around the nodes above, and the effective passes and trials of those nodes.

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
        """Return the concentration by the method of moments.

        For n trials of a unit, E(r − μ)² = μ(1 − μ)(1/n + ρ(1 − 1/n)), and ρ = 1 / (concentration + 1).
        """
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
    """Return the node above each node. Raise ``ValueError`` if a node has prompts of two nodes above."""
    parents = np.zeros(int(codes.max(initial=0)) + 1, dtype=np.int64)
    parents[codes] = above
    require(bool((parents[codes] == above).all()), "strata", "not nested", "each stratum within one of the depth above")
    return parents


class Strata(Prior):
    """A prompt is like the prompts of its stratum. ``trees``: the arguments of ``Tree``, one for each division.

    The beliefs' counts determine everything, so there is no state to save.
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
        """Draw a tree by its weight, then one rate for each of its strata, so that a stratum is explored as a whole."""
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
        # Forgetting counts from the last fair visit: prompts with signal are visited often, and would outweigh others.
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
    """For studies: validations tell the pass rate of each stratum, at no cost to the run.

    What a run with strata lacks against the oracle is its chooser's fault. ``names``: for each prompt the metric with
    its stratum's rate. Until a rate is told, visits estimate it.
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
    """Return how many rollouts of a prompt its stratum in this tree counts as."""
    low, high = WORTHS
    return min(max(tree.concentration, low), high)


def counts_of(rates: np.ndarray, worth: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the Beta that counts as ``worth`` rollouts at these rates: passes and failures."""
    right = np.clip(worth * rates, TINY, worth - TINY).astype(np.float32)
    return right, np.float32(worth) - right
