"""Beliefs about each prompt: flat arrays with a row per prompt, 34 bytes per row.

A belief is a Beta posterior: the rollouts of the prompt added to a prior (``goldilocks.core.priors``). Counts are saved
under ``prompt.key``; ``prompt.index`` is the row in this run. Every visit discounts the earlier ones, since the policy
has changed. The posterior does not depend on the rule by which a group stopped, so adaptive groups update it as well as
fixed ones.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from goldilocks.core.priors import Flat, Prior
from goldilocks.core.source import KeyedPositions
from goldilocks.errors import require
from goldilocks.types import POSITIVE_THRESHOLD, Group, Prompt

FIELDS = ("positives", "negatives", "visits", "streak", "tokens", "last_step", "drawn_step")
MEMORY = 512  # groups after which a score has mostly decayed
EDGE = 0.01  # forecasts are scored as if in [EDGE, 1 − EDGE]


@dataclass
class BeliefScore:
    """Compares beliefs with the mean over all prompts, by the log-loss of the last few hundred uniform draws.

    Prompts that a selector chooses are biased towards a pass rate of 0.5, so only uniform draws are scored. Both
    forecasts are made when the prompt is drawn. The sums decay; ``groups`` counts all groups.
    """

    belief_loss: float = 0.0
    mean_loss: float = 0.0
    rates: float = 0.0
    weight: float = 0.0
    groups: int = 0

    def mean(self, believed: float) -> float:
        """Return the mean pass rate: ``believed`` counts as ``MEMORY`` groups beside the uniform draws."""
        return (self.rates + MEMORY * believed) / (self.weight + MEMORY)

    @property
    def skill(self) -> float:
        """The share of the mean's loss that beliefs save; 0 or less if they are no better."""
        return 1 - self.belief_loss / self.mean_loss if self.mean_loss else 0.0

    def add(self, belief: float, mean: float, passes: int, trials: int) -> None:
        """Score a group; ``belief`` and ``mean`` were the two forecasts of its pass rate."""
        kept = 1 - 1 / MEMORY
        self.belief_loss = kept * self.belief_loss + log_loss(belief, passes / trials)
        self.mean_loss = kept * self.mean_loss + log_loss(mean, passes / trials)
        self.rates, self.weight = kept * self.rates + passes / trials, kept * self.weight + 1
        self.groups += 1

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def log_loss(forecast: float, rate: float) -> float:
    p = min(max(float(forecast), EDGE), 1 - EDGE)
    return float(-rate * np.log(p) - (1 - rate) * np.log(1 - p))


class Beliefs:
    """Per prompt: a Beta posterior over its pass rate, visits, the streak of zero-variance visits, expected length."""

    def __init__(
        self,
        keys: np.ndarray,
        *,
        positive_threshold: float = POSITIVE_THRESHOLD,
        forgetting: float = 0.9,
        prior: Prior | None = None,
    ) -> None:
        accepted = "between 0 (only the last visit counts) and 1 (nothing is forgotten)"
        require(0 <= forgetting <= 1, "goldilocks.forgetting", forgetting, accepted)
        size = len(keys)
        self.keys = np.asarray(keys, dtype=np.uint64)
        self.positive_threshold = positive_threshold
        self.forgetting = forgetting
        self.positives = np.zeros(size, dtype=np.float32)
        self.negatives = np.zeros(size, dtype=np.float32)
        self.visits = np.zeros(size, dtype=np.uint32)
        self.streak = np.zeros(size, dtype=np.uint16)
        self.tokens = np.zeros(size, dtype=np.float32)
        self.last_step = np.zeros(size, dtype=np.uint32)
        self.drawn_step = np.zeros(size, dtype=np.uint32)  # of the last fair visit: first, or drawn uniformly
        self.mean_tokens = 0.0
        self.now = 0  # the last update that a group was recorded at
        self.prior = prior or Flat()
        self.score = BeliefScore()
        self._news = True  # whether a group was recorded since the prior last caught up
        self._probes: dict[int, tuple[float, float]] = {}  # by key: the forecasts of uniform draws

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + sum(getattr(self, name).nbytes for name in FIELDS))

    def is_positive(self, reward: float) -> bool:
        return reward >= self.positive_threshold

    def record(self, group: Group, *, informative: bool, step: int) -> None:
        """Learn from one finished visit. ``informative``: its rewards differed."""
        row, seen = group.prompt.index, len(group)
        if self._is_fair(group.prompt):
            self.drawn_step[row] = step
        positives = self._score(group)
        tokens = group.tokens / seen
        self.positives[row] = self.forgetting * self.positives[row] + positives
        self.negatives[row] = self.forgetting * self.negatives[row] + seen - positives
        self.tokens[row] = tokens if not self.visits[row] else 0.5 * (self.tokens[row] + tokens)
        self.streak[row] = 0 if informative else min(int(self.streak[row]) + 1, 65_535)
        self.visits[row] += 1
        self.last_step[row] = step
        self.now = max(self.now, step)
        self._news = True
        self.mean_tokens += 0.01 * (tokens - self.mean_tokens) if self.mean_tokens else tokens

    def record_unjudged(self, group: Group) -> None:
        """Score the beliefs by a group that is given up before it is judged. It does not count as a visit."""
        self._score(group)

    def _score(self, group: Group) -> int:
        """Score the beliefs if the prompt was drawn uniformly, and return how many rollouts passed."""
        passes = sum(self.is_positive(rollout.reward) for rollout in group.rollouts)
        expected = self._probes.pop(group.prompt.key, None)
        if expected is not None:
            self.score.add(*expected, passes, len(group))
        return passes

    def _is_fair(self, prompt: Prompt) -> bool:
        """Whether the prompt was chosen independently of its own rollouts: a first visit, or a uniform draw."""
        return not self.visits[prompt.index] or prompt.key in self._probes

    def probe(self, rows: np.ndarray) -> np.ndarray:
        """Note that these prompts were drawn uniformly, so that beliefs are scored on them. Return them."""
        keys, expected = self.keys[rows].tolist(), self.pass_rate(rows).tolist()
        mean = self.score.mean(self.prior.overall())
        self._probes.update((key, (one, mean)) for key, one in zip(keys, expected, strict=True))
        return rows

    def _catch_up(self) -> None:
        if self._news:
            self.prior.catch_up(self)
            self._news = False

    def posterior(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the two parameters of each prompt's Beta posterior."""
        self._catch_up()
        return self._with_own(rows, *self.prior.mean(rows))

    def _with_own(self, rows: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return a + self.positives[rows], b + self.negatives[rows]

    def pass_rate(self, rows: np.ndarray) -> np.ndarray:
        a, b = self.posterior(rows)
        return np.asarray(a / (a + b))

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return one draw from each posterior, given one draw of what prompts share.

        A Beta draw is a ratio of two gamma draws, which are quick in single precision.
        """
        self._catch_up()
        a, b = self._with_own(rows, *self.prior.draw(rows, rng))
        x = rng.standard_gamma(a, dtype=np.float32)
        return np.asarray(x / (x + rng.standard_gamma(b, dtype=np.float32)))

    def expected_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Return the expected tokens of a rollout; for a prompt never seen, the mean of all."""
        return np.where(self.visits[rows] > 0, self.tokens[rows], max(self.mean_tokens, 1.0))

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of visited prompts only: the file grows with the run, not with the data set."""
        rows = np.flatnonzero(self.visits)
        state: dict[str, Any] = {name: getattr(self, name)[rows] for name in FIELDS}
        return {
            **state,
            "keys": self.keys[rows],
            "rows": rows,
            "mean_tokens": self.mean_tokens,
            "priors": np.stack(self.prior.mean(rows)),  # for readers of the file
            "prior": self.prior.state_dict(),
            "score": self.score.state_dict(),
            "probes": sorted((key, *expected) for key, expected in self._probes.items()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Find the prompt of each belief by key; drop beliefs whose prompt is gone from the data."""
        rows = KeyedPositions(self.keys).find(state["keys"], state["rows"])
        for name in FIELDS:
            column = getattr(self, name)
            column[:] = 0
            column[rows[rows >= 0]] = np.asarray(state[name])[rows >= 0]
        self.mean_tokens = float(state["mean_tokens"])
        self.now = int(self.last_step.max(initial=0))
        self.prior.load_state_dict(state["prior"])
        self.score.load_state_dict(state["score"])
        self._probes = {key: (belief, mean) for key, belief, mean in state["probes"]}
        self._news = True

    def metrics(self) -> dict[str, float]:
        """Return the prior's metrics and the score of the beliefs; empty for a flat prior."""
        if isinstance(self.prior, Flat):
            return {}
        return {**self.prior.metrics(), "belief/skill": self.score.skill, "belief/scored": float(self.score.groups)}
