"""A prompt never tried is believed to be what a regression on its features forecasts.

The regression learns from every group that comes in, kept or not, and forgets as the policy moves. A forecast counts as
``worth`` rollouts of the prompt. Given the features, the rollouts of one group are alike: the regression weighs them as
a beta-binomial of the same ``worth`` does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from goldilocks.core.logistic import Logistic
from goldilocks.core.priors.base import Counts, Prior
from goldilocks.core.source import KeyedPositions
from goldilocks.errors import require
from goldilocks.types import Prompt

SAMPLE = 64  # prompts whose features are saved with the regression
SAME = 0.1  # standard deviations: data that a few prompts were added to have features that differ by less
SOME = 1024  # prompts that stand for all
Observation = tuple[int, int, int, int, int]  # a prompt's key and row, passes, trials, the version of the policy


class Forecast(Prior):
    """``features``: a row for each prompt, in the order of ``keys``, the prompts' keys."""

    def __init__(
        self,
        features: np.ndarray,
        keys: np.ndarray,
        *,
        worth: float = 8.0,
        forgetting: float = 0.98,
        precision: float = 1.0,
    ) -> None:
        require(worth > 0, "goldilocks.forecast.worth", worth, "rollouts above 0 that a forecast counts as")
        require(0 < forgetting <= 1, "goldilocks.forecast.forgetting", forgetting, "what an update leaves, in (0, 1]")
        require(precision > 0, "goldilocks.forecast.precision", precision, "a precision above 0")
        self.worth = worth
        self.forgetting = forgetting
        self._features = features
        self._keys = keys
        self._model = Logistic(features.shape[1], prior=precision, forgetting=forgetting)
        self._pending: list[Observation] = []
        self._version = 0

    def mean(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._counts(self._model.predict(self._features[rows]))

    def overall(self) -> float:
        return float(self._model.predict(self._features[:: max(len(self._features) // SOME, 1)]).mean())

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """By one draw of the weights, the same for every prompt."""
        return self._counts(self._model.draw(self._features[rows], rng))

    def _counts(self, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        right = np.clip(self.worth * rates, 1e-3, self.worth - 1e-3).astype(np.float32)
        return right, np.float32(self.worth) - right

    def observe(self, prompt: Prompt, passes: int, trials: int, version: int) -> None:
        self._pending.append((prompt.key, prompt.index, passes, trials, version))

    def catch_up(self, counts: Counts) -> None:
        pending, self._pending = np.array(self._pending, dtype=np.uint64).reshape(-1, 5), []
        rows = KeyedPositions(self._keys).find(pending[:, 0], pending[:, 1])
        there = rows >= 0  # the others are gone from the data
        passes, trials, versions = pending[there, 2:].astype(np.float64).T
        now = int(versions.max(initial=self._version))
        self._model.forget(now - self._version)
        self._version = now
        weights = self.forgetting ** (now - versions) * (self.worth + 1) / (self.worth + trials)
        self._model.learn(self._features[rows[there]], weights * passes, weights * trials)

    def state_dict(self) -> dict[str, Any]:
        sample = np.argsort(self._keys, kind="stable")[:SAMPLE]
        return {
            "pending": list(self._pending),
            "version": self._version,
            "model": self._model.state_dict(),
            "sample": {"keys": self._keys[sample], "rows": sample, "features": self._features[sample]},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A regression on other features than those of today is not taken over: it is learnt anew."""
        if self._knows(state.get("sample")):
            self._model.load_state_dict(state["model"])
            self._version = state["version"]
            self._pending = [tuple(one) for one in state["pending"]]

    def _knows(self, sample: dict[str, np.ndarray] | None) -> bool:
        """Whether the prompts of a saved sample have the features today that they had then."""
        if sample is None or sample["features"].shape[1] != self._features.shape[1]:
            return False
        rows = KeyedPositions(self._keys).find(sample["keys"], sample["rows"])
        there = rows >= 0
        same = np.abs(self._features[rows[there]] - sample["features"][there]) < SAME
        return bool(there.mean() > 0.5 and same.all())

    def metrics(self) -> dict[str, float]:
        return {"belief/worth": self.worth}
