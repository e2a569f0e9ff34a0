"""Beliefs about each prompt: flat arrays with a row per prompt, 34 bytes per row.

A belief is a Beta posterior: the rollouts of the prompt on a prior (``goldilocks.core.priors``). Counts are stored
under ``prompt.key``; ``prompt.index`` is the row in this run. Every visit forgets a little of the earlier ones, since
the policy has changed. The posterior does not depend on the rule by which a group stopped, so adaptive groups update it
as well as fixed ones.

Are beliefs better than knowing nothing of the prompt but the mean of all?

Both are scored by the log-loss of what came out, over the last few hundred groups whose prompts were drawn uniformly:
prompts that are chosen are biased towards a pass rate of 0.5. Both forecasts are made when the prompt is drawn.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from goldilocks.core.priors import Flat, Prior
from goldilocks.core.source import KeyedPositions
from goldilocks.errors import require
from goldilocks.types import Group, Prompt

FIELDS = ("positives", "negatives", "visits", "streak", "tokens", "last_step", "drawn_step")


class Beliefs:
    """Per prompt: a Beta posterior over its pass rate, visits, the streak of zero-variance visits, expected length."""

    def __init__(
        self,
        keys: np.ndarray,
        *,
        positive_threshold: float = 0.5,
        forgetting: float = 0.9,
        prior: Prior | None = None,
    ) -> None:
        require(0 <= forgetting <= 1, "ledger.forgetting", forgetting, "between 0 (only the last visit) and 1 (none)")
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
        self.drawn_step = np.zeros(size, dtype=np.uint32)  # of the last visit that was not owed to its own rollouts
        self.mean_tokens = 0.0
        self.now = 0  # the last update that a group was recorded at
        self.prior = prior or Flat()
        self.score = BeliefScore()
        self._news = True  # since the prior last caught up
        self._probes: dict[int, tuple[float, float]] = {}  # by key: what beliefs and the mean expect of uniform draws

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
        positives = self._observe(group)
        tokens = group.tokens / seen
        self.positives[row] = self.forgetting * self.positives[row] + positives
        self.negatives[row] = self.forgetting * self.negatives[row] + seen - positives
        self.tokens[row] = tokens if not self.visits[row] else 0.5 * (self.tokens[row] + tokens)
        self.streak[row] = 0 if informative else min(int(self.streak[row]) + 1, 65_535)
        self.visits[row] += 1
        self.last_step[row] = step
        self.now = max(self.now, step)
        self.mean_tokens += 0.01 * (tokens - self.mean_tokens) if self.mean_tokens else tokens

    def record_unjudged(self, group: Group) -> None:
        """Let the prior learn from a group that is given up before it is judged; it is no visit."""
        self._observe(group)

    def _observe(self, group: Group) -> int:
        """Score the beliefs if the prompt was drawn uniformly, tell the prior, and return how many rollouts passed."""
        passes, trials = sum(self.is_positive(rollout.reward) for rollout in group.rollouts), len(group)
        fair, expected = self._is_fair(group.prompt), self._probes.pop(group.prompt.key, None)
        if expected is not None:
            self.score.add(*expected, passes, trials)
        self.prior.observe(group.prompt, passes, trials, group.version, fair=fair)
        self._news = True
        return passes

    def _is_fair(self, prompt: Prompt) -> bool:
        """Whether the visit is not owed to the prompt's own rollouts: it is the first, or was drawn uniformly."""
        return not self.visits[prompt.index] or prompt.key in self._probes

    def probe(self, rows: np.ndarray) -> np.ndarray:
        """Note that these prompts were drawn uniformly: beliefs are scored by what comes of them. Returns them."""
        keys, expected = self.keys[rows].tolist(), self.pass_rate(rows).tolist()
        mean = self.score.mean(self.prior.overall())
        self._probes.update((key, (one, mean)) for key, one in zip(keys, expected, strict=True))
        return rows

    def _catch_up(self) -> None:
        if self._news:
            self.prior.catch_up(self)
            self._news = False

    def posterior(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The Beta posterior's two parameters; a prompt never seen has its prior."""
        self._catch_up()
        return self._with_own(rows, *self.prior.mean(rows))

    def _with_own(self, rows: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return a + self.positives[rows], b + self.negatives[rows]

    def pass_rate(self, rows: np.ndarray) -> np.ndarray:
        """The posterior mean."""
        a, b = self.posterior(rows)
        return np.asarray(a / (a + b))

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One draw from each posterior, given one draw of what prompts share.

        A Beta draw is a ratio of two gamma draws, quick in single precision.
        """
        self._catch_up()
        a, b = self._with_own(rows, *self.prior.draw(rows, rng))
        x = rng.standard_gamma(a, dtype=np.float32)
        return np.asarray(x / (x + rng.standard_gamma(b, dtype=np.float32)))

    def expected_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Tokens a rollout; for a prompt never seen, what rollouts cost on average."""
        return np.where(self.visits[rows] > 0, self.tokens[rows], max(self.mean_tokens, 1.0))

    def state_dict(self) -> dict[str, Any]:
        """Only prompts that were visited: the file grows with the run, not with the data set."""
        rows = np.flatnonzero(self.visits)
        state: dict[str, Any] = {name: getattr(self, name)[rows] for name in FIELDS}
        return {
            **state,
            "keys": self.keys[rows],
            "rows": rows,
            "mean_tokens": self.mean_tokens,
            "priors": np.stack(self.prior.mean(rows)),  # for whoever reads the file: what each belief began with
            "prior": self.prior.state_dict(),
            "score": self.score.state_dict(),
            "probes": sorted((key, *expected) for key, expected in self._probes.items()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Beliefs find their prompts by key; those whose prompt is gone from the data are let go."""
        rows = KeyedPositions(self.keys).find(state["keys"], state["rows"])
        for name in FIELDS:
            column = getattr(self, name)
            column[:] = 0
            column[rows[rows >= 0]] = np.asarray(state.get(name, state["last_step"]))[rows >= 0]
        self.mean_tokens = float(state["mean_tokens"])
        self.now = int(self.last_step.max(initial=0))
        self.prior.load_state_dict(state.get("prior", {}))
        self.score.load_state_dict(state.get("score", {}))
        self._probes = {key: (belief, mean) for key, belief, mean in state.get("probes", ())}
        self._news = True

    def metrics(self) -> dict[str, float]:
        """What is believed where, if prompts share anything, and what that is worth."""
        if isinstance(self.prior, Flat):
            return {}
        return {**self.prior.metrics(), "belief/skill": self.score.skill, "belief/scored": float(self.score.groups)}


MEMORY = 512  # groups: what lies further back counts for less and less
EDGE = 0.01  # no belief is surer than this


@dataclass
class BeliefScore:
    """Decayed sums over groups; ``groups`` counts them all."""

    belief_loss: float = 0.0
    mean_loss: float = 0.0
    rates: float = 0.0
    weight: float = 0.0
    groups: int = 0

    def mean(self, believed: float) -> float:
        """The mean of all: as believed, and as uniform draws show. Where little is right, a few dozen draws are few."""
        return (self.rates + MEMORY * believed) / (self.weight + MEMORY)

    @property
    def skill(self) -> float:
        """The share of the mean's loss that beliefs save; 0 or less: they are no better."""
        return 1 - self.belief_loss / self.mean_loss if self.mean_loss else 0.0

    def add(self, belief: float, mean: float, passes: int, trials: int) -> None:
        """A group came in. ``belief`` and ``mean`` were the two forecasts of its pass rate."""
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
    """Per rollout, of a group with this pass rate."""
    p = float(np.clip(forecast, EDGE, 1 - EDGE))
    return float(-rate * np.log(p) - (1 - rate) * np.log(1 - p))
