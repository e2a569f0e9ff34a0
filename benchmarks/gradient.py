"""Is the gradient honest where groups are stopped early? The exact policy gradient on a bandit, by pass rate.

    python benchmarks/gradient.py

A prompt has one right answer, which is given with chance p; the reward is 1 or 0. The gradient of the expected reward
is p(1 - p) in the logit of the right answer. A group of n rollouts, k of them right, adds Σ A (r - p), where A are its
advantages; groups of equal rewards add nothing. Stop rules see rewards alone, so the answers of each kind are as
likely as without the rule: the expected gradient has the direction of the true one for every rule and estimator whose
advantages sum to 0, and the rule changes its size. Nothing is drawn: expectations are over all outcomes.

The rules are the allocators of the recipes. ``frontier`` knows the rate as a prior of eight rollouts would, at the
price that it has in the table of docs/priors.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from goldilocks.core import Beliefs
from goldilocks.core.allocators import Adaptive, Allocator, Fixed, Pilot, Sequential
from goldilocks.types import Cost, Group, Prompt, Rollout

RATES = (0.02, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.98)
SHOWN = (0.02, 0.1, 0.5, 0.9, 0.98)  # in docs/priors.md
N = 8
PRIOR = 8.0  # rollouts
EARNED = 0.084  # informative groups a rollout
Advantage = Callable[[int, int], float]

# What a group of n with k right adds: Σ A (r - p) is k(n - k)/n times what A is of r - r̄, whatever p.
ESTIMATORS: dict[str, Advantage] = {
    "grpo": lambda n, k: 1 / (math.sqrt(k * (n - k) / (n * (n - 1))) + 1e-6),  # over the std
    "grpo, no std": lambda n, k: 1.0,  # Dr. GRPO
    "rloo": lambda n, k: n / (n - 1),
}


def rules() -> dict[str, Allocator]:
    sequential = Sequential(N)
    sequential._earned, sequential._paid = 1e3 * EARNED, 1e3
    return {
        "fixed": Fixed(N),
        "pilot": Pilot(4, 12),
        "frontier": sequential,
        "contrast": Adaptive(max_n=32, rollouts_per_batch=4, stop="contrast"),  # type: ignore[arg-type]
        "adaptive": Adaptive(max_n=32),
    }


def ends(rule: Allocator, p: float) -> dict[tuple[int, int], float]:
    """Return the chance that a group ends with n rollouts of which k are right, for each (n, k)."""
    beliefs = Beliefs(np.arange(1, dtype=np.uint64), cost=Cost.ROLLOUTS)
    right, wrong = max(PRIOR * p - 1, -0.9), max(PRIOR * (1 - p) - 1, -0.9)
    beliefs.positives[:], beliefs.negatives[:] = right, wrong
    (first,) = rule.first(np.zeros(1, dtype=np.int64), beliefs)
    open_groups, ended = _more({(0, 0): 1.0}, first, p), {}
    while open_groups:
        grown: dict[tuple[int, int], float] = {}
        for (n, k), chance in open_groups.items():
            beliefs.positives[:], beliefs.negatives[:] = right + k, wrong + n - k  # learnt from these rollouts
            rollouts = [Rollout("g", index, float(index < k), 1) for index in range(n)]
            wanted = rule.wanted(Group("g", Prompt(0, 0), rollouts, planned=first), beliefs)
            if wanted <= n:
                ended[n, k] = ended.get((n, k), 0.0) + chance
            else:
                for state, one in _more({(n, k): chance}, wanted - n, p).items():
                    grown[state] = grown.get(state, 0.0) + one
        open_groups = grown
    return ended


def _more(states: dict[tuple[int, int], float], rollouts: int, p: float) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for (n, k), chance in states.items():
        for right in range(rollouts + 1):
            state = n + rollouts, k + right
            also = math.comb(rollouts, right) * p**right * (1 - p) ** (rollouts - right)
            found[state] = found.get(state, 0.0) + chance * also
    return found


def sizes(rule: Allocator, estimator: Advantage, p: float) -> tuple[float, float]:
    """Return the gradient over p(1 - p), per rollout that was generated, and per rollout of a group that is kept."""
    ended = ends(rule, p)
    kept = {(n, k): chance for (n, k), chance in ended.items() if 0 < k < n}
    gradient = sum(chance * k * (n - k) / n * estimator(n, k) for (n, k), chance in kept.items()) / (p * (1 - p))
    generated, trained = (sum(chance * n for (n, _), chance in some.items()) for some in (ended, kept))
    return gradient / generated, gradient / trained


def shown(size: float) -> str:
    return f"{size + 1e-9:.2f}"  # 7/8 is 0.88 on every machine


def main() -> None:
    titles = ("per rollout generated", "per rollout trained, over that of fixed groups with the same filter")
    for place, title in enumerate(titles):
        print(f"\ngradient over p(1 - p), {title}")
        print(f"{'estimator':<14}{'rule':<10}" + "".join(f"{f'p={p}':>8}" for p in RATES))
        for name, estimator in ESTIMATORS.items():
            fixed = [sizes(Fixed(N), estimator, p)[1] if place else 1.0 for p in RATES]
            for rule, allocator in rules().items():
                found = [sizes(allocator, estimator, p)[place] for p in RATES]
                figures = "".join(f"{shown(one / by):>8}" for one, by in zip(found, fixed, strict=True))
                print(f"{name:<14}{rule:<10}{figures}")


if __name__ == "__main__":
    main()
