"""What became of every rollout: the accounts of the run, and what happened in one step, as metrics.

**Accounts.** The classes sum to what was generated, at every moment. A rollout is posted once, when it arrives, and
from then on only moves from one class to another. ``goldilocks.types.Account`` lists the classes. Tokens that tools
wrote into rollouts were not generated: they are in no class and have a total of their own.

A rollout that stopped when the batch was full goes on with the next policy. Its group counts it as in flight. Its
tokens are charged to the account ``paused`` when it pauses. When it pauses again or ends, that charge is taken back and
all its tokens are posted. So a token is charged once, in the step that wrote it, however often its rollout pauses.

**A step.** Groups are counted when they are judged. Kept and generated length and difficulty stand side by side, so
that a filter that favours short answers or easy prompts shows. A metric that is no number is left out, and said once.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from goldilocks.sheet import Sheet
from goldilocks.types import (
    MIN_STD,
    OUTCOME,
    REWARD,
    Account,
    AccountName,
    Event,
    Failure,
    Group,
    Paused,
    Rollout,
    Verdict,
    is_informative,
    signal,
)

logger = logging.getLogger(__name__)

RolloutName = tuple[str, int]  # its group and its index
NO_REWARD = "non_finite_reward"  # why a rollout failed


class Accounts:
    """Rollouts and tokens by class. ``generated_*`` are counted apart from the classes, so that the sum is a check."""

    def __init__(self) -> None:
        self.generated_rollouts = 0
        self.generated_tokens = 0
        self.tool_tokens = 0  # of rollouts that arrived
        self.rollouts: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.rewards: dict[str, float] = {}  # what reward functions have cost, by what was counted

    def charge(self, rewards: Mapping[str, float]) -> None:
        """Add what reward functions have cost: calls, seconds, and so on."""
        for name, cost in rewards.items():
            self.rewards[name] = self.rewards.get(name, 0) + cost

    def post(self, account: Account, tokens: int, rollouts: int = 1) -> None:
        """Count a rollout that has arrived; minus one rollout, of minus its tokens, undoes that."""
        self.generated_rollouts += rollouts
        self.generated_tokens += tokens
        self._add(account, rollouts, tokens)

    def move(self, rollouts: Collection[Rollout], origin: Account | AccountName, target: Account | AccountName) -> None:
        if rollouts:
            count, tokens = len(rollouts), sum(rollout.tokens for rollout in rollouts)
            self._add(origin, -count, -tokens)
            self._add(target, count, tokens)

    def _add(self, name: str, rollouts: int, tokens: int) -> None:
        account = str(name)  # a plain string, so that a saved state holds nothing else
        self.rollouts[account] = self.rollouts.get(account, 0) + rollouts
        self.tokens[account] = self.tokens.get(account, 0) + tokens

    def check(self) -> None:
        """Raise if a token is unaccounted for. Cheap enough to call at every step."""
        for name, generated, classes in (
            ("rollouts", self.generated_rollouts, self.rollouts),
            ("tokens", self.generated_tokens, self.tokens),
        ):
            if sum(classes.values()) != generated or min(classes.values(), default=0) < 0:
                raise AssertionError(f"accounts do not sum: {generated} {name} generated, classes {classes}")

    def by_class(self, counts: dict[str, int]) -> dict[str, int]:
        """Return the counts with reasons folded into their class; unused classes count 0."""
        folded = {str(account): 0 for account in Account}
        for account, count in counts.items():
            folded[account.partition("/")[0]] += count
        return folded

    def metrics(self) -> dict[str, float]:
        """Return running totals by class and by reason: ``accounts/<class>_tokens`` and ``_rollouts``."""
        values: dict[str, float] = {
            "accounts/generated_rollouts": self.generated_rollouts,
            "accounts/generated_tokens": self.generated_tokens,
            "accounts/tool_tokens": self.tool_tokens,
        }
        for unit, counts in (("rollouts", self.rollouts), ("tokens", self.tokens)):
            for account, count in {**self.by_class(counts), **counts}.items():
                values[f"accounts/{account}_{unit}"] = count
        return values | {f"accounts/reward_{name}": cost for name, cost in self.rewards.items()}

    def __repr__(self) -> str:
        trained = self.by_class(self.rollouts)[Account.TRAINED]
        return f"Accounts({self.generated_rollouts:,} rollouts generated, {trained:,} trained)"

    def _repr_html_(self) -> str:
        rows = [
            [account, f"{self.rollouts[account]:,}", f"{tokens:,}", f"{tokens / max(self.generated_tokens, 1):.1%}"]
            for account, tokens in sorted(self.tokens.items())
            if self.rollouts[account]
        ]
        total = ["generated", f"{self.generated_rollouts:,}", f"{self.generated_tokens:,}", ""]
        return Sheet(["account", "rollouts", "tokens", "share"], [*rows, total]).in_html()

    def state_dict(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in vars(self):
            setattr(self, name, dict(state[name]) if isinstance(state[name], dict) else state[name])


class PausedRollouts:
    """The tokens that each paused rollout has written."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.tokens: dict[RolloutName, int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def begin(self, event: Paused) -> None:
        self.tokens[event.uid, event.index] = event.tokens
        self._accounts.post(Account.PAUSED, event.tokens)

    def end(self, event: Event) -> int:
        """Take the charge of a rollout back and return its tokens; 0 if the rollout was not paused."""
        tokens = self.tokens.pop((event.uid, event.index), None)
        if tokens is not None:
            self._accounts.post(Account.PAUSED, -tokens, -1)
        return tokens or 0

    def retain(self, names: Collection[RolloutName]) -> None:
        """Let only these rollouts go on. The tokens of the others are lost, and count as cancelled."""
        for name in self.tokens.keys() - set(names):
            tokens = self.tokens.pop(name)
            self._accounts.post(Account.PAUSED, -tokens, -1)
            self._accounts.post(Account.CANCELLED, tokens)

    def state_dict(self) -> list[Any]:
        return [[uid, index, tokens] for (uid, index), tokens in self.tokens.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        self.tokens = {(uid, index): tokens for uid, index, tokens in state}


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
    rollouts_ended: int = 0
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
    cancelled: dict[str, int] = field(default_factory=dict)  # by group/index: in flight when their group was closed

    def arrive(self, event: Event, before: int) -> None:
        """Count one rollout and its tokens, without the ``before`` tokens that were counted when it paused."""
        self.rollouts_ended += not isinstance(event, Paused)
        self.tokens_arrived += event.tokens - before
        self.started.add(event.tokens, finished=isinstance(event, Rollout), before=before)
        self.cancelled.pop(f"{event.uid}/{event.index}", None)

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
            "adaptive_rollout/total_rollouts": self.rollouts_ended,
            "adaptive_rollout/avg_rollouts_per_sample": _ratio(judged.rollouts, judged.groups),
            "adaptive_rollout/min_rollouts_per_sample": self.fewest,
            "adaptive_rollout/max_rollouts_per_sample": self.most,
            "adaptive_rollout/samples_with_positive": self.with_positive,
            "adaptive_rollout/samples_without_positive": judged.groups - self.with_positive,
            "adaptive_rollout/positive_rate": _ratio(self.with_positive, judged.groups),
            "adaptive_rollout/efficiency": _ratio(judged.groups, self.rollouts_ended),
            "adaptive_rollout/informative_groups_per_1k_rollouts": 1000 * _ratio(self.informative, self.rollouts_ended),
        }

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self), "started": self.started.state_dict()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> StepStatistics:
        tallies = {name: Tally(**state[name]) for name in ("judged", "kept")}
        statistics = cls(**{**state, **tallies, "started": StartedLengths()})
        statistics.started.load_state_dict(state["started"])
        return statistics


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def in_words(reason: str) -> str:
    """Return why rollouts failed, for a user."""
    return f"{reason}: the reward was None, NaN or infinite" if reason == NO_REWARD else reason


class FiniteMetrics:
    """Drops metrics that are no numbers; each is said once. A rollout needs those judged by and the one of passes."""

    def __init__(self, judged_by: Set[str], of_passes: str | None) -> None:
        self._needed = {*judged_by, of_passes or OUTCOME} - {REWARD}
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
