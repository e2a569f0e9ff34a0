"""A prompt never tried is believed to be like the prompts it resembles.

Which prompts resemble one another may be said in several ways, each a tree (``goldilocks.core.priors.tree``); that all
do is one of them. A tree counts by how well its strata forecast the prompts that were visited, each from the others.

A stratum counts as ``worth`` rollouts of a prompt. It is estimated from how much prompts of one stratum differ beyond
chance. Strata that say nothing have prompts that differ as much within them as between them: their ``worth`` is small,
and their rates are those of all. No switch decides whether they are used.

Everything is a function of the ledger's counts, so there is no state to save.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from goldilocks.core.priors.base import Counts, Prior
from goldilocks.core.priors.tree import TINY, Tree, Visited
from goldilocks.errors import require

BENEFIT_OF_DOUBT = 3.0  # nats by which strata must forecast better than the mean of all to count for as much
MOST = 65_536  # prompts that strata are estimated from, those of the latest draws: a choice takes a tenth of a second
WORTHS = (1.0, 64.0)  # rollouts that a stratum counts as for one of its prompts, at least and at most


class Strata(Prior):
    """``trees``: each has, for each depth, the coarsest first, the stratum of each prompt."""

    def __init__(self, trees: Sequence[Sequence[np.ndarray]], *, forgetting: float = 0.98) -> None:
        accepted = "what an update leaves, in (0, 1]"
        require(0 < forgetting <= 1, "goldilocks.prior_kwargs.forgetting", forgetting, accepted)
        self.forgetting = forgetting
        everything = np.zeros_like(trees[0][0])
        self.trees = [Tree([everything]), *map(Tree, trees)]
        self.weights = np.full(len(self.trees), 1 / len(self.trees))

    def mean(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The mean over the trees, each with its weight."""
        rates = sum(w * tree.means()[tree.leaf[rows]] for w, tree in zip(self.weights, self.trees, strict=True))
        return counts_of(np.asarray(rates), self.worth)

    def overall(self) -> float:
        return float(self.weights @ [tree.overall() for tree in self.trees])

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """One tree by its weight, and the rate of each of its strata once: a stratum is explored as a whole."""
        tree = self.trees[int(rng.choice(len(self.trees), p=self.weights))]
        return counts_of(tree.draw(rng)[tree.leaf[rows]], worth_of(tree))

    @property
    def worth(self) -> float:
        """The mean over the trees, each with its weight."""
        return float(self.weights @ [worth_of(tree) for tree in self.trees])

    def catch_up(self, counts: Counts) -> None:
        rows = np.flatnonzero(counts.visits)
        if len(rows) > MOST:
            latest = np.argsort(counts.drawn_step[rows], kind="stable")[-MOST:]
            rows = rows[np.sort(latest)]
        passes = counts.positives[rows].astype(np.float64)
        trials = passes + counts.negatives[rows]
        # Prompts that show signal are visited again and again. If that kept them fresh, they would speak for all.
        fresh = self.forgetting ** (counts.now - counts.drawn_step[rows].astype(np.float64))
        visited = Visited(rows, passes / trials, trials, fresh)
        for tree in self.trees:
            tree.fit(visited)
        alike = self.trees[0].concentration
        likelihoods = np.array([tree.log_likelihood(visited, alike) for tree in self.trees])
        likelihoods[0] += BENEFIT_OF_DOUBT + np.log(len(self.trees))  # of many trees, one is better by chance
        weights = np.exp(likelihoods - likelihoods.max())
        self.weights = weights / weights.sum()

    def metrics(self) -> dict[str, float]:
        best = self.trees[int(self.weights.argmax())]
        return {"belief/strata": float(len(best)), "belief/worth": self.worth}


def worth_of(tree: Tree) -> float:
    """The rollouts that a stratum of this tree counts as for one of its prompts."""
    return float(np.clip(tree.concentration, *WORTHS))


def counts_of(rates: np.ndarray, worth: float) -> tuple[np.ndarray, np.ndarray]:
    """The Beta that counts as ``worth`` rollouts at these rates: passes and failures."""
    right = np.clip(worth * rates, TINY, worth - TINY).astype(np.float32)
    return right, np.float32(worth) - right
