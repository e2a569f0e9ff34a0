"""Bayesian logistic regression, online: a normal belief about the weights that every batch of groups sharpens.

The posterior is Laplace's: the most probable weights, and the curvature there. Forgetting is a power of the posterior
times the complementary power of the prior, so without news the belief returns to the prior and never sharpens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NEWTON_STEPS = 12
CLOSE = 1e-6


class Logistic:
    """The chance of a pass is σ(x · w), with w ~ Normal(``mean``, ``precision``⁻¹)."""

    def __init__(self, width: int, *, prior: float = 1.0, forgetting: float = 0.98) -> None:
        self.mean: np.ndarray = np.zeros(width)
        self.precision: np.ndarray = np.eye(width) * prior
        self._prior = prior
        self._forgetting = forgetting

    def forget(self, updates: int) -> None:
        """So many updates have changed the policy that was observed."""
        if updates <= 0:
            return
        kept = self._forgetting**updates
        pull = kept * self.precision @ self.mean
        self.precision = kept * self.precision + (1 - kept) * self._prior * np.eye(len(self.mean))
        self.mean = np.linalg.solve(self.precision, pull)

    def learn(self, x: np.ndarray, passes: np.ndarray, trials: np.ndarray) -> None:
        """Counts of passes among trials, one pair a row; fractions weigh less than a whole observation."""
        if not len(x):
            return
        w, prior_mean, prior_precision = self.mean, self.mean, self.precision
        curvature = prior_precision
        for _ in range(NEWTON_STEPS):
            p = sigmoid(x @ w)
            slope = x.T @ (passes - trials * p) - prior_precision @ (w - prior_mean)
            curvature = prior_precision + (x * (trials * p * (1 - p))[:, None]).T @ x
            step = np.linalg.solve(curvature, slope)
            # A full Newton step overshoots where the curve is flat: no logit moves by more than 4 at a time.
            step *= min(1.0, 4.0 / max(np.abs(x @ step).max(), 1e-12))
            w = w + step
            if np.abs(step).max() < CLOSE:
                break
        self.mean, self.precision = w, curvature

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The chance of a pass, with the weights' uncertainty integrated out (MacKay's approximation)."""
        variance = np.einsum("ij,ij->i", x, np.linalg.solve(self.precision, x.T).T)
        return sigmoid(x @ self.mean / np.sqrt(1 + np.pi / 8 * variance))

    def draw(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The chance of a pass by one draw of the weights, the same for every row."""
        noise = np.linalg.solve(np.linalg.cholesky(self.precision).T, rng.standard_normal(len(self.mean)))
        return sigmoid(x @ (self.mean + noise))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "precision": self.precision}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.precision = np.array(state["mean"]), np.array(state["precision"])


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """σ, without overflow."""
    return np.asarray(1 / (1 + np.exp(-np.clip(logits, -30, 30))))
