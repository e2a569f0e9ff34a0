"""Forecast the pass rate of prompts, also of those never tried, from their features; take those nearest the target.

A logistic regression on features learns from every group that comes in, kept or not, and forgets as the policy moves.
A forecast counts as ``worth`` rollouts of the prompt. The rollouts that the prompt has had are added to it, and a
pass rate is drawn from both, so that uncertain prompts get their turn. Given the features, the rollouts of one group
are alike: the regression weighs them as a beta-binomial of the same ``worth`` does.

A share of the prompts is drawn uniformly, and the forecast is scored on those alone: the prompts that it chooses are
half right by choice. While its score on prompts it had not seen is no better than the mean's, every prompt is the
next of the shuffled pass, as with ``uniform``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from goldilocks.core.forecast_score import ForecastScore
from goldilocks.core.ledger import Ledger
from goldilocks.core.logistic import Logistic
from goldilocks.core.pool import Pool
from goldilocks.core.selectors.base import Selector
from goldilocks.core.source import KeyedPositions
from goldilocks.errors import require
from goldilocks.types import Group

Observation = tuple[int, int, int, list[float]]  # a prompt's key and index, the version of the policy, the rewards


@dataclass
class Forecast(Selector):
    """Thompson sampling over a regression on features and the prompt's own counts."""

    target: float = 0.5
    worth: float = 8.0  # of thousands of prompts out of reach, some draw is near the target if it counts for less
    explore: float = 0.1
    forgetting: float = 0.98
    prior: float = 1.0
    window: int = 262_144
    needs_features: ClassVar[bool] = True
    _score: ForecastScore = field(default_factory=ForecastScore, init=False)
    _pending: list[Observation] = field(default_factory=list, init=False)
    _probes: set[int] = field(default_factory=set, init=False)  # keys of prompts that were drawn uniformly
    _version: int = field(default=0, init=False)
    _features: np.ndarray | None = field(default=None, init=False, repr=False)
    _model: Logistic | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        require(0 < self.target < 1, "selector.target", self.target, "a pass rate in (0, 1)")
        require(self.worth > 0, "selector.worth", self.worth, "rollouts above 0 that a forecast counts as")
        require(0 < self.explore <= 1, "selector.explore", self.explore, "a share of uniform draws in (0, 1]")
        require(0 < self.forgetting <= 1, "selector.forgetting", self.forgetting, "what an update leaves, in (0, 1]")
        require(self.prior > 0, "selector.prior", self.prior, "a precision above 0")
        require(self.window >= 1, "selector.window", self.window, "1 or more prompts")

    def use_features(self, features: np.ndarray) -> None:
        self._features = features
        self._model = Logistic(features.shape[1], prior=self.prior, forgetting=self.forgetting)

    # -- choosing ------------------------------------------------------------------------------------------------------

    def choose(self, pool: Pool, ledger: Ledger, k: int, rng: np.random.Generator) -> np.ndarray:
        self._absorb(ledger)
        if not self._score.better:
            return self._probe(pool.next(k), ledger)
        rows = pool.free()
        if len(rows) > max(self.window, k):
            rows = rng.choice(rows, max(self.window, k), replace=False, shuffle=False)
        probes = rng.choice(rows, min(len(rows), max(1, round(self.explore * k))), replace=False)
        rest = np.setdiff1d(rows, probes, assume_unique=True)
        distance = np.abs(self._draw(rest, ledger, rng) - self.target)
        nearest = rest[np.argsort(distance, kind="stable")[: k - len(probes)]]
        return np.concatenate([self._probe(probes, ledger), nearest])

    def _probe(self, rows: np.ndarray, ledger: Ledger) -> np.ndarray:
        """Note that these were drawn uniformly; only first visits are scored."""
        self._probes.update(ledger.keys[rows[ledger.visits[rows] == 0]].tolist())
        return rows

    def _draw(self, rows: np.ndarray, ledger: Ledger, rng: np.random.Generator) -> np.ndarray:
        """A pass rate for each prompt: ``worth`` rollouts by the forecast, and those it has had."""
        features, model = self._ready()
        forecast = self.worth * model.draw(features[rows], rng)
        right, wrong = forecast + ledger.positives[rows], self.worth - forecast + ledger.negatives[rows]
        return np.asarray(rng.beta(np.maximum(right, 1e-3), np.maximum(wrong, 1e-3)))

    # -- learning ------------------------------------------------------------------------------------------------------

    def learn(self, group: Group, *, informative: bool) -> None:
        self.learn_unjudged(group)

    def learn_unjudged(self, group: Group) -> None:
        self._pending.append((group.prompt.key, group.prompt.index, group.version, list(group.rewards)))

    def _absorb(self, ledger: Ledger) -> None:
        """Score the forecasts of what came in since the last choice, and then learn from it."""
        features, model = self._ready()
        pending, self._pending = self._pending, []
        if not pending:
            return
        keys, hints = (
            np.array([key for key, *_ in pending], dtype=np.uint64),
            np.array([hint for _, hint, *_ in pending]),
        )
        rows = KeyedPositions(ledger.keys).find(keys, hints)  # -1: the prompt is gone from the data
        there = np.flatnonzero(rows >= 0)
        rows, versions = rows[there], np.array([version for *_, version, _ in pending])[there]
        passes = np.array([sum(map(ledger.is_positive, pending[place][-1])) for place in there], dtype=float)
        trials = np.array([len(pending[place][-1]) for place in there], dtype=float)
        self._judge(ledger, rows, passes, trials)
        now = int(versions.max(initial=self._version))
        model.forget(now - self._version)
        self._version = now
        weights = self.forgetting ** (now - versions) * (self.worth + 1) / (self.worth + trials)
        model.learn(features[rows], weights * passes, weights * trials)

    def _judge(self, ledger: Ledger, rows: np.ndarray, passes: np.ndarray, trials: np.ndarray) -> None:
        """Score the groups of uniform draws whose prompts had not been seen; the model has not learnt from them yet."""
        features, model = self._ready()
        keys = ledger.keys[rows].tolist()
        unseen = np.flatnonzero(
            np.array([key in self._probes for key in keys], dtype=bool) & (ledger.visits[rows] <= 1)
        )
        self._probes.difference_update(keys)
        if len(unseen):
            self._score.add(model.predict(features[rows[unseen]]), passes[unseen], trials[unseen])

    def _ready(self) -> tuple[np.ndarray, Logistic]:
        if self._features is None or self._model is None:
            raise ValueError(
                "selector='forecast' needs features of the prompts: call use_features before the first choice"
            )
        return self._features, self._model

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "score": self._score.state_dict(),
            "pending": list(self._pending),
            "probes": sorted(self._probes),
            "version": self._version,
            "model": self._ready()[1].state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A regression on other features than those of today is not taken over: it is learnt anew."""
        self._score.load_state_dict(state["score"])
        self._pending = [(key, index, version, list(rewards)) for key, index, version, rewards in state["pending"]]
        self._probes = set(state["probes"])
        self._version = state["version"]
        model = self._ready()[1]
        if len(state["model"]["mean"]) == len(model.mean):
            model.load_state_dict(state["model"])
        else:
            self._score = ForecastScore()

    def metrics(self) -> dict[str, float]:
        return {
            "selector/forecast_in_use": float(self._score.better),
            "selector/forecast_skill": self._score.skill,
            "selector/forecast_scored": self._score.groups,
        }
