"""The prior ``forecast``: a regression on the features of a prompt says what to believe before it is tried.

The regression learns from every group that comes in, kept or not, and forgets as the policy moves. A second regression
of two weights, the mean of all and a slope, learns how good earlier forecasts were. Its slope begins at 0. So a
forecast begins as the mean, and stays there while it is no better.

A forecast counts as ``worth`` rollouts of the prompt, estimated from how far groups are from their forecasts beyond
chance. Given the features, the rollouts of one group are alike: both regressions weigh them as a beta-binomial does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from goldilocks.core.priors import GUESS, GUESS_WEIGHT, TINY, UNKNOWN, WORTHS, Counts, Prior, counts_of
from goldilocks.core.source import KeyedPositions
from goldilocks.errors import require
from goldilocks.types import Prompt

NEWTON_STEPS = 12
CLOSE = 1e-6
SAMPLE = 64  # prompts whose features are saved with the regression
SAME = 0.1  # standard deviations: adding a few prompts to the data changes features by less
SOME = 1024  # prompts that the overall mean is taken over
MEMORY = 512  # groups that the estimate of worth is over, for the most part
Observation = tuple[int, int, int, int, int, int]  # key, row, passes, trials, version, whether fair


class Logistic:
    """Online Bayesian logistic regression: a pass has the chance σ(x · w), with w ~ Normal(``mean``, ``precision``⁻¹).

    The posterior is Laplace's: the most probable weights, and the curvature there. Forgetting is a power of the
    posterior times the complementary power of the prior, so without observations the posterior returns to the prior.
    """

    def __init__(self, width: int, *, prior: float = 1.0, forgetting: float = 0.98) -> None:
        self.mean: np.ndarray = np.zeros(width)
        self.precision: np.ndarray = np.eye(width) * prior
        self._prior = prior
        self._forgetting = forgetting

    def forget(self, updates: int) -> None:
        """Discount the observations by ``updates`` changes of the policy."""
        if updates <= 0:
            return
        kept = self._forgetting**updates
        pull = kept * self.precision @ self.mean
        self.precision = kept * self.precision + (1 - kept) * self._prior * np.eye(len(self.mean))
        self.mean = np.linalg.solve(self.precision, pull)

    def learn(self, x: np.ndarray, passes: np.ndarray, trials: np.ndarray) -> None:
        """Learn from passes among trials, one pair a row; fractions weigh less than a whole observation."""
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
        """Return the chance of a pass, with the weights' uncertainty integrated out (MacKay's approximation)."""
        variance = np.einsum("ij,ij->i", x, np.linalg.solve(self.precision, x.T).T)
        return sigmoid(x @ self.mean / np.sqrt(1 + np.pi / 8 * variance))

    def draw(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the chance of a pass by one draw of the weights, the same for every row."""
        noise = np.linalg.solve(np.linalg.cholesky(self.precision).T, rng.standard_normal(len(self.mean)))
        return sigmoid(x @ (self.mean + noise))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "precision": self.precision}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.precision = np.array(state["mean"]), np.array(state["precision"])


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-np.clip(logits, -30, 30))))


class Forecast(Prior):
    """``features``: a row for each prompt, in the order of ``keys``. ``worth``: None estimates it."""

    def __init__(
        self,
        features: np.ndarray,
        keys: np.ndarray,
        *,
        worth: float | None = None,
        forgetting: float = 0.98,
        precision: float = 1.0,
    ) -> None:
        accepted = f"{WORTHS[0]:g} or more rollouts that a forecast counts as"  # smaller gamma draws may both be 0
        require(worth is None or worth >= WORTHS[0], "goldilocks.prior_kwargs.worth", worth, accepted)
        accepted = "what an update leaves, in (0, 1]"
        require(0 < forgetting <= 1, "goldilocks.prior_kwargs.forgetting", forgetting, accepted)
        require(precision > 0, "goldilocks.prior_kwargs.precision", precision, "a precision above 0")
        self.forgetting = forgetting
        self._worth = worth
        self._features = features
        self._keys = keys
        self._model = Logistic(features.shape[1], prior=precision, forgetting=forgetting)
        self._calibration = Logistic(2, forgetting=forgetting)
        self._spread = np.array([GUESS_WEIGHT * GUESS, GUESS_WEIGHT])  # around forecasts, and the most there can be
        self._pending: list[Observation] = []
        self._version = 0

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def worth(self) -> float:
        correlation = max(self._spread[0] / self._spread[1], TINY**2)
        return float(np.clip(1 / correlation - 1, *WORTHS)) if self._worth is None else self._worth

    def mean(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return counts_of(self._forecast(rows), self.worth)

    def overall(self) -> float:
        return float(self._forecast(np.arange(0, len(self._features), max(len(self._features) // SOME, 1))).mean())

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        logits = _with_logits(self._model.draw(self._features[rows], rng))
        return counts_of(self._calibration.draw(logits, rng), self.worth)

    def _forecast(self, rows: np.ndarray) -> np.ndarray:
        return self._calibration.predict(_with_logits(self._model.predict(self._features[rows])))

    # -- learning ------------------------------------------------------------------------------------------------------

    def observe(self, prompt: Prompt, passes: int, trials: int, version: int, *, fair: bool) -> None:
        self._pending.append((prompt.key, prompt.index, passes, trials, version, fair))

    def catch_up(self, counts: Counts) -> None:
        pending, self._pending = np.array(self._pending, dtype=np.uint64).reshape(-1, 6), []
        rows = KeyedPositions(self._keys).find(pending[:, 0], pending[:, 1])
        there = rows >= 0  # other prompts are gone from the data
        rows, (passes, trials, versions, fair) = rows[there], pending[there, 2:].astype(np.float64).T
        now = int(versions.max(initial=self._version))
        self._model.forget(now - self._version)
        self._calibration.forget(now - self._version)
        self._version = now
        weights = self.forgetting ** (now - versions) * (UNKNOWN + 1) / (UNKNOWN + trials)
        self._compare(rows, passes, trials, weights * fair)
        self._model.learn(self._features[rows], weights * passes, weights * trials)

    def _compare(self, rows: np.ndarray, passes: np.ndarray, trials: np.ndarray, weights: np.ndarray) -> None:
        """Learn how good the forecasts of these groups were, before the regression learns from them."""
        forecast = self._forecast(rows)
        possible, fair = forecast * (1 - forecast), weights > 0
        beyond = (passes / trials - forecast) ** 2 - possible / trials
        news = np.array([beyond[fair].sum(), (possible * (1 - 1 / trials))[fair].sum()])
        self._spread = self._spread * (1 - 1 / MEMORY) ** int(fair.sum()) + news
        logits = _with_logits(self._model.predict(self._features[rows]))
        self._calibration.learn(logits, weights * passes, weights * trials)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        sample = np.argsort(self._keys, kind="stable")[:SAMPLE]
        return {
            "pending": list(self._pending),
            "version": self._version,
            "model": self._model.state_dict(),
            "calibration": self._calibration.state_dict(),
            "spread": self._spread,
            "sample": {"keys": self._keys[sample], "rows": sample, "features": self._features[sample]},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the regression, unless it was learnt on other features than today's."""
        if self._knows(state.get("sample")):
            self._model.load_state_dict(state["model"])
            self._calibration.load_state_dict(state["calibration"])
            self._spread = np.array(state["spread"])
            self._version = state["version"]
            self._pending = [(int(k), int(r), int(p), int(t), int(v), int(f)) for k, r, p, t, v, f in state["pending"]]

    def _knows(self, sample: dict[str, np.ndarray] | None) -> bool:
        """Whether the prompts of a saved sample have the same features today."""
        if sample is None or sample["features"].shape[1] != self._features.shape[1]:
            return False
        rows = KeyedPositions(self._keys).find(sample["keys"], sample["rows"])
        there = rows >= 0
        same = np.abs(self._features[rows[there]] - sample["features"][there]) < SAME
        return bool(there.mean() > 0.5 and same.all())

    def metrics(self) -> dict[str, float]:
        return {"belief/worth": self.worth}


def _with_logits(rates: np.ndarray) -> np.ndarray:
    clipped = np.clip(rates, TINY, 1 - TINY)
    return np.stack([np.ones(len(rates)), np.log(clipped / (1 - clipped))], axis=1)
