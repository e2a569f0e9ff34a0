"""What is believed of each prompt: a Beta posterior over its pass rate, and how long its answers are.

A prompt's prior is where its strata are (``goldilocks.core.effects``): log-odds of passing, and a concentration that
says how many rollouts that counts as for one prompt. Its own rollouts are added to the prior. The log of the length is
believed the same way. Without strata the prior is Beta(1, 1), and one prompt says nothing of another.

Everything is learnt from the likelihood of what was observed. The likelihood does not depend on why a prompt was chosen
or why its group stopped, so every visit is fair to learn from: whoever chooses, and whatever rule ends a group.

A prompt's own rollouts count less the further the level of its strata has moved since, and the more often the prompt
was trained. Columns are flat arrays with a row for each prompt, 38 bytes; ``prompt.index`` is the row in this run.
Counts are saved under ``prompt.key``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import lgamma
from typing import Any

import numpy as np

from goldilocks.core.effects import Division, Effects
from goldilocks.core.source import KeyedPositions
from goldilocks.types import MIN_STD, POSITIVE_THRESHOLD, Cost, Group, Rollout, is_informative, mean_and_std, outcome

FIELDS = ("positives", "negatives", "level", "moves", "visits", "recent", "streak", "tokens")
CONCENTRATIONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # rollouts that a prompt's strata may count as for it
LOG_CONCENTRATIONS = tuple(map(math.log, CONCENTRATIONS))
FLAT = 2.0  # the concentration of Beta(1, 1)
WANDERS = (0.0, 0.003, 0.01, 0.03, 0.1)  # variance, in squared log-odds, that a trained group may add to its strata
MEMORY = 0.998  # of how well each wander forecast, per group
RATES, LENGTHS = 0.6, 0.3  # variance between strata, before anything is known: of log-odds, of log-lengths
LENGTH_WANDERS = 0.002
LENGTH_NOISE = 0.25  # variance of the log of one answer's length within a prompt
ALIKE = 0.5  # correlation of two rollouts that an unknown level may bring about, at most
# Of each concentration: the correlation of two rollouts, its complement, and what doubt may raise it to.
ALIKENESS = tuple((1 / (one + 1), 1 - 1 / (one + 1), max(1 / (one + 1), ALIKE)) for one in CONCENTRATIONS)
PROBIT = math.pi / 8  # a logistic curve is near a normal one of variance 1 / PROBIT
SCORED = 1 - 1 / 512  # memory of the score, per group
EDGE = 0.01  # forecasts are scored as if in [EDGE, 1 − EDGE]


class Beliefs:
    """``divisions`` are the strata; none: a flat prior. A pass is a ``metric`` of at least ``positive_threshold``."""

    def __init__(
        self,
        keys: np.ndarray,
        *,
        divisions: Sequence[Division] = (),
        metric: str | None = "reward",
        positive_threshold: float = POSITIVE_THRESHOLD,
        cost: Cost = Cost.TOKENS,
        names: Sequence[str] = (),
        shown: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """``names``: the metric that tells the rate of each stratum of the first division, for studies (``tell``).

        ``shown``: metrics of the mean pass rate that is believed of some prompts.
        """
        size = len(keys)
        self.keys = np.asarray(keys, dtype=np.uint64)
        self.metric = metric
        self.positive_threshold = positive_threshold
        self.cost = cost
        self.positives = np.zeros(size, dtype=np.float32)
        self.negatives = np.zeros(size, dtype=np.float32)
        self.level = np.zeros(size, dtype=np.float32)  # log-odds of its strata at the last visit
        self.moves = np.zeros(size, dtype=np.float32)  # times it was trained since the last visit
        self.visits = np.zeros(size, dtype=np.uint32)
        self.recent = np.zeros(size, dtype=np.float32)  # visits, half of them forgotten with each epoch
        self.streak = np.zeros(size, dtype=np.uint16)  # of visits whose rewards did not differ
        self.tokens = np.zeros(size, dtype=np.float32)  # mean length of an answer
        self.rates = Effects(divisions, size, spread=RATES, wander=WANDERS[1])
        self.lengths = Effects(divisions, size, spread=LENGTHS, wander=LENGTH_WANDERS)
        self.concentration = FLAT
        self._concentrations = [0.0] * len(CONCENTRATIONS)  # log-likelihood of each
        self._wanders = [0.0] * len(WANDERS)  # the same, faded
        self._log_tokens = 0.0  # mean log-length of the first answers: what effects of length are around
        self._judged = 0  # groups, since ``recent`` was last faded
        self._score = {"belief": 0.0, "mean": 0.0, "passes": 0.0, "groups": 0.0}
        self._names, self._shown = names, shown or {}
        self._told = np.zeros(len(names))  # log-odds

    def __len__(self) -> int:
        return len(self.keys)

    def passed(self, rollout: Rollout) -> bool:
        return outcome(rollout, self.metric) >= self.positive_threshold

    def passes(self, group: Group) -> int:
        """Return how many of a group's rollouts passed. Each is looked at once, however often an open group is."""
        seen, passes = group.counted
        if seen < len(group):
            passes += sum(map(self.passed, group.rollouts[seen:]))
            group.counted[:] = len(group), passes
        return passes

    def differs(self, group: Group) -> bool:
        """Return whether the metric of the group's rollouts differs."""
        values = group.values(self.metric)
        return len(set(values)) > 1 and mean_and_std(values)[1] > MIN_STD  # asked of every chunk, and most agree

    def paid(self, group: Group) -> float:
        """Return what a group has cost, in the unit of ``cost``."""
        return float(group.tokens if self.cost is Cost.TOKENS else len(group))

    # -- learning ------------------------------------------------------------------------------------------------------

    def record(self, group: Group, learnt: int = 0) -> None:
        """Learn from a visit that was judged; its first ``learnt`` rollouts were learnt from before."""
        row = group.prompt.index
        self.end(group, learnt)
        self.visits[row] += 1
        self.recent[row] += 1
        self.streak[row] = 0 if self.differs(group) else min(int(self.streak[row]) + 1, 65_535)
        self._judged += 1
        if self._judged * 16 >= len(self):  # sixteen times an epoch, so that it costs nothing
            self.recent *= 2 ** (-self._judged / len(self))
            self._judged = 0

    def learn(self, group: Group, learnt: int = 0) -> None:
        """Learn the pass rate from the rollouts of a group behind the first ``learnt``.

        Each chunk is learnt from when it is complete. Learnt at their end, groups that stop at a success would come
        soon after an update and all others late, as if their strata fell from one update to the next.
        """
        seen, before = group.counted
        if seen != learnt:  # this object is new: the group was loaded, or has become older
            before = sum(map(self.passed, group.rollouts[:learnt]))
        if trials := len(group) - learnt:
            self.learn_rate(group.prompt.index, self.passes(group) - before, trials, first=not learnt)

    def trained(self, groups: Iterable[Group]) -> None:
        """Note an update: the groups that were trained have moved their prompts and strata."""
        for group in filter(is_informative, groups):
            row = group.prompt.index
            self.moves[row] += 1
            self.rates.move(row)
            self.lengths.move(row)
        self.rates.estimate_spreads()
        self.lengths.estimate_spreads()

    def tell(self, rates: Mapping[str, float]) -> None:
        """Believe pass rates of strata that were measured outside the run: to study what better beliefs would gain."""
        for stratum, name in enumerate(self._names):
            if name in rates:
                rate = min(max(rates[name], EDGE**2), 1 - EDGE**2)
                self._told[stratum] = math.log(rate / (1 - rate))

    def learn_rate(self, row: int, passes: int, trials: int, first: bool = True) -> None:
        """Learn from how many of a prompt's rollouts passed. The ``first`` of a visit also score what was forecast."""
        own, effects = (float(self.positives[row]), float(self.negatives[row])), self.rates.of(row)
        since, trained = float(self.level[row]), float(self.moves[row])
        level = self.rates.level(effects, self.rates.wander)
        if trained or level.lever:  # training moved something: weigh each wander by how well it forecasts the passes
            for j, wander in enumerate(WANDERS):
                level = self.rates.level(effects, wander)
                a, b = self._beta(level.mean, level.variance, own, since, wander * trained)
                self._wanders[j] = MEMORY * self._wanders[j] + log_likelihood(a, b, passes, trials)
            self.rates.wander = _expected(WANDERS, self._wanders)
            level = self.rates.level(effects, self.rates.wander)
        mean, wandered = level.mean, self.rates.wander * trained
        (rate, doubt), left = _level(mean, level.variance), _left(own, mean - since, wandered)
        positives, negatives = own[0] * left, own[1] * left
        if first:
            worth = _worth(self.concentration, doubt)
            a, b = worth * rate + positives, worth * (1 - rate) + negatives
            self._keep_score(a / (a + b), passes / trials)
        if len(self.rates):
            for j, (alike, other, most) in enumerate(ALIKENESS):
                worth = 1 / (known if (known := alike + doubt * other) < most else most) - 1  # as ``_worth`` has it
                a, b = worth * rate + positives, worth * (1 - rate) + negatives
                self._concentrations[j] += log_likelihood(a, b, passes, trials)
            self.concentration = math.exp(_expected(LOG_CONCENTRATIONS, self._concentrations))
            # The level learns from how likely the passes are, given the level: a Beta-binomial around it.
            rate, worth = _level(mean, 0.0)[0], self.concentration
            a, b = worth * rate + positives, worth * (1 - rate) + negatives
            slope = worth * rate * (1 - rate)
            spread = slope**2 * (a + b + 1) / (a * b)
            ups, downs = [1 / (a + j) for j in range(passes)], [1 / (b + j) for j in range(trials - passes)]
            mean += self.rates.learn(row, level, slope * (sum(ups) - sum(downs)), spread * trials / (a + b + trials))
        left = _left(own, mean - since, wandered)
        self.positives[row], self.negatives[row] = own[0] * left + passes, own[1] * left + trials - passes
        self.level[row], self.moves[row] = mean, 0

    def _beta(
        self, mean: float, variance: float, own: tuple[float, float], since: float, wandered: float
    ) -> tuple[float, float]:
        """Return the two parameters of one prompt's Beta; ``posterior`` does the same for many."""
        rate, doubt = _level(mean, variance)
        worth, left = _worth(self.concentration, doubt), _left(own, mean - since, wandered)
        return worth * rate + own[0] * left, worth * (1 - rate) + own[1] * left

    def end(self, group: Group, learnt: int = 0) -> None:
        """Learn what is left to learn of a group, and its length, also where it is given up unjudged."""
        self.learn(group, learnt)
        row, trials = group.prompt.index, len(group)
        tokens = group.tokens / trials
        self._log_tokens = self._log_tokens or math.log(max(tokens, 1.0))
        if len(self.lengths):
            level = self.lengths.level(self.lengths.of(row), LENGTH_WANDERS)
            seen = math.log(max(tokens, 1.0)) - self._log_tokens
            information = 1 / (LENGTH_NOISE * (1 + 1 / trials))  # prompts of a stratum differ as their answers do
            self.lengths.learn(row, level, (seen - level.mean) * information, information)
        self.tokens[row] = 0.5 * (self.tokens[row] + tokens) if self.visits[row] else tokens

    def _keep_score(self, forecast: float, rate: float) -> None:
        """Score the belief beside the mean of all groups, by the log-loss of the last few hundred groups."""
        score = self._score
        mean = (score["passes"] + 0.5) / (score["groups"] + 1)
        score["belief"] = SCORED * score["belief"] + log_loss(forecast, rate)
        score["mean"] = SCORED * score["mean"] + log_loss(mean, rate)
        score["passes"] = SCORED * score["passes"] + rate
        score["groups"] = SCORED * score["groups"] + 1

    # -- reading -------------------------------------------------------------------------------------------------------

    def posterior(self, rows: np.ndarray, rng: np.random.Generator | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the two parameters of each prompt's Beta; with ``rng``, given one draw of what strata share."""
        mean, variance = self.rates.sums(rows)
        if len(self._told):
            mean, variance = self._told[self.rates.stratum(rows)], np.zeros(len(rows))
        own = self.positives[rows].astype(np.float64), self.negatives[rows].astype(np.float64)
        left = _left(own, mean - self.level[rows], self.rates.wander * self.moves[rows])
        if rng is not None and not len(self._told):
            mean, variance = self.rates.sums(rows, rng)
        rate = 1 / (1 + np.exp(-np.clip(mean / np.sqrt(1 + PROBIT * variance), -15, 15)))
        worth = _worth(self.concentration, variance * rate * (1 - rate), np.minimum)
        return worth * rate + own[0] * left, worth * (1 - rate) + own[1] * left

    def posterior_of(self, row: int) -> tuple[float, float]:
        """Return the two parameters of one prompt's Beta."""
        level = self.rates.level(self.rates.of(row), self.rates.wander)
        mean, variance = level.mean, level.variance
        if len(self._told):
            mean, variance = float(self._told[self.rates.stratum(row)]), 0.0
        own, trained = (float(self.positives[row]), float(self.negatives[row])), float(self.moves[row])
        return self._beta(mean, variance, own, float(self.level[row]), self.rates.wander * trained)

    def pass_rate(self, rows: np.ndarray) -> np.ndarray:
        a, b = self.posterior(rows)
        return np.asarray(a / (a + b))

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return one draw from each posterior, given one draw of what strata share: a stratum is explored as a whole.

        A Beta draw is a ratio of two gamma draws, which are quick in single precision.
        """
        a, b = self.posterior(rows, rng)
        x = rng.standard_gamma(a.astype(np.float32), dtype=np.float32)
        return np.asarray(x / (x + rng.standard_gamma(b.astype(np.float32), dtype=np.float32)))

    def expected_cost(self, rows: np.ndarray) -> np.ndarray:
        """Return what a rollout of each prompt is expected to cost, in the unit of ``cost``."""
        if self.cost is Cost.ROLLOUTS:
            return np.ones(len(rows))
        shared = np.exp(self._log_tokens + self.lengths.sums(rows)[0])
        seen = np.minimum(self.visits[rows], 4)  # each visit counts as much as the strata do
        return np.asarray((shared + seen * self.tokens[rows]) / (1 + seen))

    def expected_cost_of(self, row: int) -> float:
        """Return the same for one prompt."""
        if self.cost is Cost.ROLLOUTS:
            return 1.0
        shared = math.exp(self._log_tokens + self.lengths.level(self.lengths.of(row), LENGTH_WANDERS).mean)
        seen = min(int(self.visits[row]), 4)
        return (shared + seen * float(self.tokens[row])) / (1 + seen)

    def metrics(self) -> dict[str, float]:
        """Return how well beliefs forecast, and how much strata say; empty for a flat prior."""
        if not len(self.rates):
            return {}
        return {
            "belief/strata": float(len(self.rates) - 1),
            "belief/worth": self.concentration,
            "belief/drift": self.rates.drift,
            "belief/wander": self.rates.wander,
            "belief/skill": 1 - self._score["belief"] / self._score["mean"] if self._score["mean"] else 0.0,
            **{name: float(self.pass_rate(rows).mean()) for name, rows in self._shown.items()},
        }

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the prompts with rollouts only: the file grows with the run, not with the data set."""
        rows = np.flatnonzero(self.positives + self.negatives)
        posterior = np.stack(self.posterior(rows)) if len(rows) else np.zeros((2, 0))
        return {
            **{name: getattr(self, name)[rows] for name in FIELDS},
            "keys": self.keys[rows],
            "rows": rows,
            "posterior": posterior,  # for readers of the file
            "rates": self.rates.state_dict(),
            "lengths": self.lengths.state_dict(),
            "concentration": self.concentration,
            "concentrations": list(self._concentrations),
            "wanders": list(self._wanders),
            **{name: getattr(self, f"_{name}") for name in ("log_tokens", "judged")},
            "score": dict(self._score),
            "told": dict(zip(self._names, (1 / (1 + np.exp(-self._told))).tolist(), strict=True)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        KeyedPositions(self.keys).load(state, {name: getattr(self, name) for name in FIELDS})
        self.rates.load_state_dict(state["rates"])
        self.lengths.load_state_dict(state["lengths"])
        self._concentrations, self._wanders = list(state["concentrations"]), list(state["wanders"])
        self._log_tokens, self._judged = state["log_tokens"], state["judged"]
        self._score = dict(state["score"])
        self.tell(state["told"])
        self.concentration = float(state["concentration"])


def _level(mean: float, variance: float) -> tuple[float, float]:
    """Return the expected rate of a level in log-odds, and how much is not known of it."""
    rate = 1 / (1 + math.exp(-min(max(mean / math.sqrt(1 + PROBIT * variance), -15.0), 15.0)))
    return rate, variance * rate * (1 - rate)


def _worth(concentration: float, doubt: Any, smaller: Callable[[Any, Any], Any] = min) -> Any:
    """Return how many rollouts the prior counts as: fewer where the level is not known."""
    alike = 1 / (concentration + 1)
    return 1 / smaller(alike + doubt * (1 - alike), alike if alike > ALIKE else ALIKE) - 1


def _left(own: tuple[Any, Any], moved: Any, wandered: Any) -> Any:
    """Return the share of a prompt's own rollouts that still counts, after a move of log-odds and a variance added."""
    return 1 / (1 + (wandered + moved**2) * (own[0] + own[1]) / 4)


def _expected(values: Sequence[float], log_likelihoods: Sequence[float]) -> float:
    top = max(log_likelihoods)
    weights = [math.exp(one - top) for one in log_likelihoods]
    return math.fsum(map(operator.mul, weights, values)) / math.fsum(weights)


def log_likelihood(a: float, b: float, passes: int, trials: int) -> float:
    """Return the log-probability of these outcomes, in the order they came, under Beta(a, b)."""
    both = lgamma(a + b) - lgamma(a + b + trials)
    return both + lgamma(a + passes) - lgamma(a) + lgamma(b + trials - passes) - lgamma(b)


def log_loss(forecast: float, rate: float) -> float:
    p = min(max(forecast, EDGE), 1 - EDGE)
    return -rate * math.log(p) - (1 - rate) * math.log(1 - p)
