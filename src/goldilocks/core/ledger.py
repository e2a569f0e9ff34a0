"""Beliefs about each prompt: flat arrays with a row per prompt, 30 bytes per row.

Beliefs are stored under ``prompt.key``; ``prompt.index`` is the row in this run. Every visit forgets a little of the
earlier ones, since the policy has changed. The Beta posterior does not depend on the rule by which a group stopped, so
adaptive groups update it as well as fixed ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from goldilocks.core.source import KeyedPositions
from goldilocks.errors import require
from goldilocks.types import Group

FIELDS = ("positives", "negatives", "visits", "streak", "tokens", "last_step")


class Ledger:
    """Per prompt: a Beta posterior over its pass rate, visits, the streak of zero-variance visits, expected length."""

    def __init__(self, keys: np.ndarray, *, positive_threshold: float = 0.5, forgetting: float = 0.9) -> None:
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
        self.mean_tokens = 0.0

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
        positives = sum(self.is_positive(rollout.reward) for rollout in group.rollouts)
        tokens = group.tokens / seen
        self.positives[row] = self.forgetting * self.positives[row] + positives
        self.negatives[row] = self.forgetting * self.negatives[row] + seen - positives
        self.tokens[row] = tokens if not self.visits[row] else 0.5 * (self.tokens[row] + tokens)
        self.streak[row] = 0 if informative else min(int(self.streak[row]) + 1, 65_535)
        self.visits[row] += 1
        self.last_step[row] = step
        self.mean_tokens += 0.01 * (tokens - self.mean_tokens) if self.mean_tokens else tokens

    def posterior(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The Beta posterior's two parameters; a prompt never seen has the uniform prior (1, 1)."""
        return 1 + self.positives[rows], 1 + self.negatives[rows]

    def pass_rate(self, rows: np.ndarray) -> np.ndarray:
        """The posterior mean."""
        a, b = self.posterior(rows)
        return np.asarray(a / (a + b))

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One draw from each posterior: a Beta draw is a ratio of two gamma draws, quick in single precision."""
        a, b = self.posterior(rows)
        x = rng.standard_gamma(a, dtype=np.float32)
        return np.asarray(x / (x + rng.standard_gamma(b, dtype=np.float32)))

    def expected_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Tokens a rollout; for a prompt never seen, what rollouts cost on average."""
        return np.where(self.visits[rows] > 0, self.tokens[rows], max(self.mean_tokens, 1.0))

    def state_dict(self) -> dict[str, Any]:
        """Only prompts that were visited: the file grows with the run, not with the data set."""
        rows = np.flatnonzero(self.visits)
        state: dict[str, Any] = {name: getattr(self, name)[rows] for name in FIELDS}
        return {**state, "keys": self.keys[rows], "rows": rows, "mean_tokens": self.mean_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Beliefs find their prompts by key; those whose prompt is gone from the data are let go."""
        rows = KeyedPositions(self.keys).find(state["keys"], state["rows"])
        for name in FIELDS:
            column = getattr(self, name)
            column[:] = 0
            column[rows[rows >= 0]] = np.asarray(state[name])[rows >= 0]
        self.mean_tokens = float(state["mean_tokens"])
