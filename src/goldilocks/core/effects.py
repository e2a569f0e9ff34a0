"""What prompts of the same strata share: a sum of effects, one of all prompts and one of each stratum a prompt is in.

Effects are independent Gaussians around 0. The spread of each division is estimated from its strata, so a division that
says nothing fades by itself. What is observed of a prompt moves each of its effects by the effect's share of the
uncertainty.

Training moves effects too. A trained group counts as one move for the strata of its prompt, and as a tenth of one for
all prompts. A move adds ``drift`` to an effect and ``wander`` to its variance: a stratum that rises is believed to go
on rising, and what was seen of it fades. Nothing fades where nothing was trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from goldilocks.core.source import KeyedPositions

ALL = 0.1  # of a move: what training in one stratum moves all prompts by
TOP = 4.0  # variance of the effect of all prompts, before anything is known
WIDEST, NARROWEST = 9.0, 2e-3  # variance of the effects of a division
DOUBT = 2.0  # strata that the first guess of a division's spread counts as
ROUNDS = 3  # of each estimate of the spreads
DRIFT = 0.02**2  # variance of the drift, before anything is known
GOLDEN = 0x9E3779B97F4A7C15  # its multiples spread over 64 bits: keys of two divisions do not meet
DRIFT_CHANGES = 0.001**2  # what an observation adds to it: training may speed up and slow down


@dataclass(frozen=True)
class Division:
    """The stratum of each prompt, from 0, and a key for each stratum that another run finds it by."""

    strata: np.ndarray
    keys: np.ndarray


class Level(NamedTuple):
    """The sum of one prompt's effects after their moves.

    ``lever`` is how much of the moves' drift it has taken up. ``now``: mean, variance, prior precision of each effect.
    """

    mean: float
    variance: float
    lever: float
    now: list[tuple[float, float, float]]


class Effects:
    """``spread``: the variance of all divisions together, before anything is known. No division: every sum is 0."""

    def __init__(self, divisions: Sequence[Division], size: int, *, spread: float, wander: float) -> None:
        top = [Division(np.zeros(size, dtype=np.int32), np.zeros(1, dtype=np.uint64))] if divisions else []
        parts = [*top, *divisions]
        counts = [len(one.keys) for one in parts]
        starts = np.cumsum([0, *counts[:-1]], dtype=np.int64) if parts else np.empty(0, dtype=np.int64)
        nodes = [one.strata.astype(np.int32) + np.int32(start) for one, start in zip(parts, starts, strict=True)]
        self._nodes = np.stack(nodes, axis=1) if parts else np.empty((size, 0), dtype=np.int32)  # a row for each prompt
        self._division = np.repeat(np.arange(len(parts)), counts)
        # A stratum of each division has its own name, although keys of two divisions may be the same.
        named = [one.keys ^ np.uint64(place * GOLDEN % 2**64) for place, one in enumerate(parts)]
        self._keys = np.concatenate(named) if parts else np.empty(0, dtype=np.uint64)
        self._guess = spread / max(len(divisions), 1)
        self._spread = np.array([TOP, *[self._guess] * len(divisions)][: len(parts)])
        # Of each effect, a row: precision and precision times mean without its prior, moves, the prior's precision.
        self._effects = np.zeros((len(self._keys), 4))
        self._precision, self._weighted, self._moves, self._prior = self._effects.T
        self._prior[:] = 1 / self._spread[self._division]
        self._numbers: Any = self._effects.reshape(-1).data  # the same: a few are written quicker by it
        self._scale = np.array([ALL, *[1.0] * len(divisions)][: len(parts)])
        self.wander = wander
        self.drift = 0.0
        self._drift_variance = DRIFT

    def __len__(self) -> int:
        return len(self._keys)

    def of(self, row: int) -> list[list[float]]:
        """Return the effects of one prompt, as they are kept."""
        effects: list[list[float]] = self._effects.take(self._nodes[row], axis=0).tolist()
        return effects

    def level(self, effects: list[list[float]], wander: float) -> Level:
        """Return the sum of one prompt's effects; ``sums`` does the same for many.

        What was observed fades as effects wander; what is not observed is around 0, as wide as the spread.
        """
        mean = variance = lever = 0.0
        now = []
        for precision, weighted, moves, prior in effects:
            if moves:
                faded = 1 + precision * wander * moves
                own = 1 / (prior + precision / faded)
                share = own / faded
                one, lever = share * (weighted + precision * self.drift * moves), lever + share * precision * moves
            else:  # the same, sooner
                own = 1 / (prior + precision)
                one = own * weighted
            mean, variance = mean + one, variance + own
            now.append((one, own, prior))
        return Level(mean, variance, lever, now)

    def sums(self, rows: np.ndarray, rng: np.random.Generator | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the variance of each prompt's sum; with ``rng``, of one draw of all effects."""
        faded = 1 + self._precision * self.wander * self._moves
        variances = 1 / (self._prior + self._precision / faded)
        means = variances / faded * (self._weighted + self._precision * self.drift * self._moves)
        if rng is not None:
            means = means + np.sqrt(variances) * rng.standard_normal(len(means))
            variances = np.zeros_like(variances)
        mean, variance = np.zeros(len(rows)), np.zeros(len(rows))
        for mine in self._nodes[rows].T:
            mean += means[mine]
            variance += variances[mine]
        return mean, variance

    def stratum(self, rows: np.ndarray | int) -> np.ndarray:
        """Return the stratum of each prompt in the first division."""
        return np.asarray(self._nodes[rows, 1] - 1)  # the first node is that of all prompts

    def learn(self, row: int, level: Level, gradient: float, information: float) -> float:
        """Move the effects of a prompt, whose level is given, by one observation; return by how much the sum moved.

        ``gradient`` is that of the observation's log-likelihood at the sum after its moves, ``information`` how much it
        says. That must not depend on what was observed: how many rollouts a chunk has is known before it is asked for.
        """
        _, own, lever, now = level
        total = own + self._drift_variance * lever**2
        step = max(min(total * gradient / (1 + total * information), 2.0), -2.0)
        shrink = information / (1 + total * information)
        self.drift += self._drift_variance * lever / total * step
        self._drift_variance += DRIFT_CHANGES - (self._drift_variance * lever) ** 2 * shrink
        numbers = self._numbers
        for node, (mean, variance, prior) in zip(self._nodes[row].tolist(), now, strict=True):
            left, at = variance - variance * variance * shrink, 4 * node
            precision = 1 / left - prior
            numbers[at] = precision if precision > 1e-9 else 1e-9
            numbers[at + 1], numbers[at + 2] = (mean + variance / total * step) / left, 0.0
        return step * own / total

    def move(self, row: int) -> None:
        """Note that a group of this prompt was trained."""
        self._moves[self._nodes[row]] += self._scale

    def estimate_spreads(self) -> None:
        """Set the spread of each division to what its strata show: the mean of their squared effects."""
        seen = np.flatnonzero((self._precision > 0) & (self._division > 0))
        division, count = self._division[seen], len(self._spread)
        for _ in range(ROUNDS if len(seen) else 0):
            variances = 1 / (1 / self._spread[division] + self._precision[seen])
            squares = (variances * self._weighted[seen]) ** 2 + variances
            found = np.bincount(division, squares, count) + DOUBT * self._guess
            spread = found / (np.bincount(division, minlength=count) + DOUBT)
            self._spread[1:] = np.clip(spread[1:], NARROWEST, WIDEST)
        self._prior[:] = 1 / self._spread[self._division]

    def state_dict(self) -> dict[str, Any]:
        """Return the strata that were observed or moved, by key."""
        rows = np.flatnonzero((self._precision > 0) | (self._moves > 0))
        columns = {"precision": self._precision[rows], "weighted": self._weighted[rows], "moves": self._moves[rows]}
        scalars = {"wander": self.wander, "drift": self.drift, "drift_variance": self._drift_variance}
        return {"keys": self._keys[rows], "rows": rows, "spread": self._spread.copy(), **columns, **scalars}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        columns = {"precision": self._precision, "weighted": self._weighted, "moves": self._moves}
        KeyedPositions(self._keys).load(state, columns)
        if len(state["spread"]) == len(self._spread):  # else the run goes on with other divisions
            self._spread = np.array(state["spread"], dtype=np.float64)
            self._prior[:] = 1 / self._spread[self._division]
        self.wander, self.drift = float(state["wander"]), float(state["drift"])
        self._drift_variance = float(state["drift_variance"])
