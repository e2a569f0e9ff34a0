"""``benchmarks/gradient.py``: what each stop rule and estimator makes of the policy gradient."""

from __future__ import annotations

from pathlib import Path

import gradient
import numpy as np
import pytest


def test_the_gradient_of_fixed_groups_is_the_true_one_by_rloo_and_an_eighth_short_by_their_own_mean() -> None:
    for p in gradient.RATES:
        assert gradient.sizes(gradient.Fixed(8), gradient.ESTIMATORS["rloo"], p)[0] == pytest.approx(1)
        assert gradient.sizes(gradient.Fixed(8), gradient.ESTIMATORS["grpo, no std"], p)[0] == pytest.approx(7 / 8)


def test_groups_of_every_rule_end_with_certainty_and_their_gradient_has_the_right_sign() -> None:
    for rule in gradient.rules().values():
        for p in gradient.RATES:
            assert sum(gradient.ends(rule, p).values()) == pytest.approx(1)
            assert all(gradient.sizes(rule, estimator, p)[0] > 0 for estimator in gradient.ESTIMATORS.values())


def test_answers_drawn_from_a_bandit_have_the_expected_gradient() -> None:
    """Four answers, one right; the gradient in all logits, of groups that the rule ended, with advantages by row."""
    rng, draws = np.random.default_rng(0), 6_000
    policy = np.array([0.2, 0.4, 0.3, 0.1])  # the first is right
    p = policy[0]
    for name, estimator in gradient.ESTIMATORS.items():
        ended = gradient.ends(gradient.rules()["frontier"], p)
        states, chances = list(ended), np.array(list(ended.values()))
        total, rollouts = np.zeros(4), 0
        for place in rng.choice(len(states), draws, p=chances / chances.sum()):
            n, k = states[place]
            rollouts += n
            if 0 < k < n:
                wrong = 1 + rng.choice(3, n - k, p=policy[1:] / (1 - p))
                answers, rewards = np.concatenate([np.zeros(k, int), wrong]), np.arange(n) < k
                advantages = (rewards - k / n) * estimator(n, k)
                total += advantages @ (np.eye(4)[answers] - policy)
        true = p * (np.eye(4)[0] - policy)
        size = gradient.sizes(gradient.rules()["frontier"], estimator, p)[0]
        assert total / rollouts == pytest.approx(size * true, abs=0.05 * size * p), name


def test_the_page_has_the_figures_of_the_benchmark() -> None:
    page = (Path(__file__).parents[2] / "docs/priors.md").read_text()
    for name, estimator in gradient.ESTIMATORS.items():
        for rule, allocator in gradient.rules().items():
            found = [gradient.sizes(allocator, estimator, p)[0] for p in gradient.SHOWN]
            assert f"| {name} | {rule} | " + " | ".join(map(gradient.shown, found)) + " |" in page
