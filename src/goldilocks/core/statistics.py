"""What happened in one step, as metrics, and the share of groups that the filter keeps.

Groups are counted when they are judged. Kept and generated length and difficulty stand side by side, so that a filter
that favours short answers or easy prompts shows.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from goldilocks.types import MIN_STD, Event, Failure, Group, Rollout, Verdict, is_informative, signal

logger = logging.getLogger(__name__)

NO_REWARD = "non_finite_reward"  # why a rollout failed
TALLIES = ("judged", "kept")
PRIOR_WEIGHT = 4.0  # groups that the user's expectation of the keep rate counts as
FORGETTING = 0.9  # of the keep rate, per step: the policy moves, and the rate with it


class StartedLengths:
    """Estimates how long the rollouts of a step would be if none were aborted.

    A rule that trains the rollouts that finish first trains short answers. The mean over finished rollouts does not
    show it, because long rollouts were aborted. The Kaplan-Meier estimate counts both: a rollout aborted at length L
    counts as one that went past every length below L. A rollout that paused in an earlier step with B tokens says
    nothing about lengths below B: it counts from B on.
    """

    def __init__(self) -> None:
        self._finished: Counter[int] = Counter()
        self._aborted: Counter[int] = Counter()
        self._resumed: Counter[int] = Counter()  # by the length at which they went on

    def add(self, tokens: int, *, finished: bool, before: int = 0) -> None:
        """Count one rollout, of which ``before`` tokens were written in an earlier step."""
        if tokens > before or not before:
            (self._finished if finished else self._aborted)[tokens] += 1
            if before:
                self._resumed[before] += 1

    @property
    def mean(self) -> float:
        """The estimated mean length of all rollouts that were started; 0 if none was."""
        at_risk = self._finished.total() + self._aborted.total() - self._resumed.total()
        mean, surviving, last = 0.0, 1.0, 0
        for length in sorted({*self._finished, *self._aborted, *self._resumed}):
            mean += surviving * (length - last)
            surviving *= 1 - self._finished[length] / at_risk if at_risk else 1.0
            at_risk += self._resumed[length] - self._finished[length] - self._aborted[length]
            last = length
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {name.lstrip("_"): sorted(counts.items()) for name, counts in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, counts in state.items():
            setattr(self, f"_{name}", Counter(dict(counts)))


@dataclass
class Tally:
    """Sums over groups."""

    groups: int = 0
    rollouts: int = 0
    tokens: int = 0
    reward: float = 0.0

    def add(self, rollouts: int, tokens: int, reward: float) -> None:
        """Count a group."""
        self.groups += 1
        self.rollouts += rollouts
        self.tokens += tokens
        self.reward += reward

    @property
    def mean_tokens(self) -> float:
        return _ratio(self.tokens, self.rollouts)


@dataclass
class StepStatistics:
    """The counts of one step."""

    prompts_issued: int = 0
    rollouts_asked: int = 0
    tokens_arrived: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    judged: Tally = field(default_factory=Tally)
    kept: Tally = field(default_factory=Tally)
    started: StartedLengths = field(default_factory=StartedLengths)
    dropped: dict[str, int] = field(default_factory=dict)
    informative: int = 0
    with_positive: int = 0
    passes: int = 0
    spread: float = 0.0
    iterations: int = 0
    fewest: int = 0
    most: int = 0
    expired: int = 0
    rejected: int = 0
    backfilled: int = 0
    components: dict[str, list[float]] = field(default_factory=dict)  # the sum of a metric, and of how many rollouts

    def arrive(self, event: Event, before: int) -> None:
        """Count the tokens of one rollout, without the ``before`` tokens that were counted when it paused."""
        self.tokens_arrived += event.tokens - before
        self.started.add(event.tokens, finished=isinstance(event, Rollout), before=before)

    def judge(self, group: Group, verdict: Verdict, *, spread: float, passes: int, iterations: int) -> None:
        """Count one judged group: ``spread`` is the deviation of its rewards, and ``passes`` rollouts passed."""
        size, tokens, reward = len(group), group.tokens, sum(group.rewards)
        self.fewest = min(self.fewest, size) if self.judged.groups else size
        self.most = max(self.most, size)
        self.judged.add(size, tokens, reward)
        if verdict.keep:
            self.kept.add(size, tokens, reward)
        else:
            self.dropped[verdict.reason] = self.dropped.get(verdict.reason, 0) + 1
        self.informative += spread > MIN_STD
        self.with_positive += passes > 0
        self.passes += passes
        self.spread += spread if spread > MIN_STD else 0.0
        for name, mean in self.components.items():
            values = [rollout.metrics[name] for rollout in group.rollouts if name in rollout.metrics]
            mean[:] = mean[0] + math.fsum(values), mean[1] + len(values)
        self.iterations = max(self.iterations, iterations)

    def batch_metrics(self, batch: Sequence[Group], step: int) -> dict[str, float]:
        """Return the metrics of the batch in hand."""
        lengths = [rollout.tokens for group in batch for rollout in group.trained]
        ages = [step - group.version for group in batch]
        return {
            "train/age_mean": _ratio(sum(ages), len(ages)),
            "train/age_max": max(ages, default=0),
            "train/informative_groups": sum(map(is_informative, batch)),
            "train/signal": math.fsum(map(signal, batch)),
            "length/trained_over_started": _ratio(_ratio(sum(lengths), len(lengths)), self.started.mean),
        }

    def num_gen_batches(self, gen_batch_size: int) -> int:
        """Generation batches begun; a step that trains carried groups alone counts as one."""
        return max(-(-self.prompts_issued // gen_batch_size), 1)

    def metrics(self, gen_batch_size: int) -> dict[str, float]:
        """Return the metrics of the step; ratios over nothing are 0."""
        judged, kept = self.judged, self.kept
        return {
            "train/num_gen_batches": self.num_gen_batches(gen_batch_size),
            "train/filtered_prompts_ratio": _ratio(max(kept.groups - self.rejected, 0), judged.groups),
            "train/prompts_issued": self.prompts_issued,
            "train/groups_judged": judged.groups,
            "train/groups_expired": self.expired,
            "train/groups_rejected": self.rejected,
            "train/groups_backfilled": self.backfilled,
            "train/rollout_failures": sum(self.failures.values()),
            "length/generated_mean": judged.mean_tokens,
            "length/kept_mean": kept.mean_tokens,
            "length/kept_over_generated": _ratio(kept.mean_tokens, judged.mean_tokens),
            "difficulty/generated_mean_reward": _ratio(judged.reward, judged.rollouts),
            "difficulty/kept_mean_reward": _ratio(kept.reward, kept.rollouts),
            "difficulty/pass_rate": _ratio(self.passes, judged.rollouts),
            "difficulty/reward_std": _ratio(self.spread, judged.groups),
            **{f"reward/{name}": total / count for name, (total, count) in self.components.items() if count},
            **{f"filter/dropped/{reason}": count for reason, count in self.dropped.items()},
            **{f"train/rollout_failures/{reason}": count for reason, count in self.failures.items()},
            "adaptive_rollout/iterations": self.iterations,
            "adaptive_rollout/total_rollouts": judged.rollouts,
            "adaptive_rollout/avg_rollouts_per_sample": _ratio(judged.rollouts, judged.groups),
            "adaptive_rollout/min_rollouts_per_sample": self.fewest,
            "adaptive_rollout/max_rollouts_per_sample": self.most,
            "adaptive_rollout/samples_with_positive": self.with_positive,
            "adaptive_rollout/samples_without_positive": judged.groups - self.with_positive,
            "adaptive_rollout/positive_rate": _ratio(self.with_positive, judged.groups),
            "adaptive_rollout/efficiency": _ratio(judged.groups, judged.rollouts),
            "adaptive_rollout/informative_groups_per_1k_rollouts": 1000 * _ratio(self.informative, judged.rollouts),
        }

    def state_dict(self) -> dict[str, Any]:
        counts = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in (*TALLIES, "started")}
        tallies = {name: asdict(getattr(self, name)) for name in TALLIES}
        return {**counts, **tallies, "started": self.started.state_dict()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> StepStatistics:
        statistics = cls(**{**state, **{name: Tally(**state[name]) for name in TALLIES}, "started": StartedLengths()})
        statistics.started.load_state_dict(state["started"])
        return statistics


class KeepRate:
    """An estimate, in (0, 1], of the share of groups that survive the filter. A refill is sized by it.

    Before any group is judged, the user's ``gen_batch_size`` is the estimate: 1,536 prompts for 512 groups is a keep
    rate of a third, and the first refill is then exactly one generation batch.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._kept = 0.0
        self._judged = 0.0

    @property
    def value(self) -> float:
        return (self._kept + PRIOR_WEIGHT * self._prior) / (self._judged + PRIOR_WEIGHT)

    def prompts_for(self, groups: int, *, deviations: float) -> int:
        """Return how many prompts to judge so that ``groups`` are kept, with this many standard deviations to spare.

        The number kept of m prompts has mean mp and variance mp(1 − p): solve mp − d·√(mp(1 − p)) = groups for m.
        """
        p = self.value
        spread = deviations / 2 * math.sqrt(p * (1 - p))
        return math.ceil(((spread + math.sqrt(spread**2 + p * groups)) / p) ** 2 - 1e-9)

    def observe(self, kept: bool) -> None:
        self._judged += 1
        self._kept += kept

    def take_back(self, groups: int) -> None:
        """Count groups that were rejected after all as not kept, so that the next refill asks for more."""
        self._kept = max(self._kept - groups, 0.0)

    def forget(self) -> None:
        """Discount the counts at the end of a step."""
        self._judged *= FORGETTING
        self._kept *= FORGETTING

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._kept, "judged": self._judged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept, self._judged = float(state["kept"]), float(state["judged"])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def in_words(reason: str) -> str:
    """Return why rollouts failed, for a user."""
    return f"{reason}: the reward was None, NaN or infinite" if reason == NO_REWARD else reason


class FiniteMetrics:
    """Drops metrics that are no numbers; each is said once. A rollout cannot be judged without those ``needed``."""

    def __init__(self, needed: Set[str]) -> None:
        self._needed = needed
        self._said: set[str] = set()

    def checked(self, rollout: Rollout) -> Rollout | Failure:
        """Return the rollout without such metrics; a failure if its reward, or one of those needed, is no number."""
        if math.isfinite(rollout.reward) and all(map(math.isfinite, rollout.metrics.values())):
            return rollout
        bad = {name for name, value in rollout.metrics.items() if not math.isfinite(value)}
        if not math.isfinite(rollout.reward) or bad & self._needed:
            return Failure(rollout.uid, rollout.index, NO_REWARD, rollout.tokens)
        for name in sorted(bad - self._said):
            logger.warning(
                "the reward function returned %s=%r: dropped, as nothing judges by it", name, rollout.metrics[name]
            )
        self._said |= bad
        return replace(rollout, metrics={name: value for name, value in rollout.metrics.items() if name not in bad})
