"""The vocabulary: everything that goes into the core and comes out of it, the names of rows in payloads, and seeds.

Data is frozen and independent of policies, engines and trainers. A ``payload`` is opaque: the core carries it from the
engine to the trainer. On a cluster it is a key into a store, so no tensor passes through the core.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from goldilocks.errors import require

W = TypeVar("W", bound="Word")

POSITIVE_THRESHOLD = 0.5  # the least reward that is a pass, unless adaptive_rollout.positive_threshold sets another
MIN_STD = 1e-6  # rewards closer than this do not differ: shaped rewards never give an exact zero
OUTCOME = "acc"  # the metric by which a reward function says whether an answer is right
REWARD = "reward"  # the name of the reward itself, among metrics
ROW_KEY = re.compile(r"(?P<group>.+)_(?P<rollout>\d+)_(?P<part>\d+)")


class Word(str, Enum):
    """A string out of a fixed list. Configs and state files hold the string."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]

    @classmethod
    def parse(cls: type[W], key: str, value: str) -> W:
        """Return the member for ``value``, or raise a ``ValueError`` that names ``key`` and lists what is accepted."""
        words = [str(member) for member in cls]
        require(value in words, key, value, f"one of {', '.join(words)}")
        return cls(value)


class Account(Word):
    """The class of a generated rollout. Every rollout is in exactly one class at any time."""

    OPEN = "open"  # in a group that has not been judged
    CARRIED = "carried"  # in a kept group that waits to be trained
    TRAINED = "trained"  # handed to the trainer
    TRIMMED = "trimmed"  # in a trained group, beyond the rows it trains; the baseline counts it
    BACKFILLED = "backfilled"  # in a dropped group that filled up an exhausted batch
    FILTERED = "filtered"  # in a group that a filter dropped; each reason is an account of its own
    EXPIRED = "expired"  # in a kept group that grew too old to train
    CANCELLED = "cancelled"  # not needed when it arrived, or aborted before it was finished
    REJECTED = "rejected"  # taken back after its group was kept; each reason is an account of its own
    FAILED = "failed"  # lost, or without a finite reward
    PAUSED = "paused"  # stopped when the batch was full, and goes on with the next policy (``on_full: partial``)
    DUPLICATE = "duplicate"  # delivered a second time

    def because(self, reason: str) -> AccountName:
        """Return the account of one reason: ``filtered/too_easy``."""
        return AccountName(f"{self}/{reason}")


class AccountName(str):
    """The name of an account with a reason, such as ``rejected/gate1``."""

    __slots__ = ()


class OnExhausted(Word):
    """What happens when the limits leave too few groups for a batch."""

    ERROR = "error"  # raise ``Exhausted``
    SHRINK = "shrink"  # train on the groups there are
    BACKFILL = "backfill"  # fill the batch up with dropped groups whose rewards are equal; they are not trained


class OnFull(Word):
    """What happens to groups that are still open when the batch is full."""

    FINISH = "finish"  # they finish, are judged and, if kept, carried
    REQUEUE = "requeue"  # they are cancelled, and their prompts go to the head of the queue
    PARTIAL = "partial"  # their rollouts pause and go on after the update


class StopRule(Word):
    """When an adaptive group has enough rollouts."""

    POSITIVE = "positive"  # at least one success
    CONTRAST = "contrast"  # at least one success and one failure
    BALANCED = "balanced"  # ``balance`` successes and as many failures


class Cost(Word):
    """What is spent, and what worth is divided by."""

    TOKENS = "tokens"
    ROLLOUTS = "rollouts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question. ``key`` is a hash of its content; ``index`` is its row in this run's source."""

    key: int
    index: int
    payload: Any = None


@dataclass(frozen=True, slots=True)
class Request:
    """Roll ``prompt`` out ``n`` times; the rollouts are numbered ``first``, ``first + 1``, … within the group ``uid``.

    ``visit`` is how many visits to the prompt were issued before this one. A request that is repeated after a restart
    keeps its number.
    """

    uid: str
    prompt: Prompt
    n: int
    first: int = 0
    visit: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One graded answer. ``version`` is the policy that wrote it, in updates; None: the policy of the current step.

    ``tokens`` were generated. ``tool_tokens`` stand between them and were not: tools or an environment wrote them.
    """

    uid: str
    index: int
    reward: float
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    version: int | None = None
    payload: Any = None
    tool_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """A rollout that failed, and the tokens it cost."""

    uid: str
    index: int
    reason: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Paused:
    """A rollout that has stopped and will go on. ``tokens`` counts everything it has written so far."""

    uid: str
    index: int
    tokens: int


Event = Rollout | Failure | Paused


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a group is kept; the reason becomes the metric ``filter/dropped/<reason>``."""

    keep: bool
    reason: str = ""


KEEP = Verdict(True)


@dataclass(frozen=True, slots=True)
class Group:
    """One visit to one prompt.

    ``rollouts`` are in the order in which they were asked for, up to the first that has not arrived: the order of
    arrival never shows. A policy that is shown an open group must not keep the sequence, which grows.
    ``planned`` is how many rollouts were first asked for, ``version`` the policy of the oldest rollout. ``trained`` is
    set when the group is taken: the rollouts to train on. Baselines come from all ``rollouts``.
    """

    uid: str
    prompt: Prompt
    rollouts: Sequence[Rollout] = ()
    planned: int = 0
    version: int = 0
    trained: Sequence[Rollout] = ()
    # How many rollouts were looked at, and how many of them passed: ``Beliefs.passes`` keeps it for itself.
    counted: list[int] = field(default_factory=lambda: [0, 0], init=False, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.rollouts)

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]

    @property
    def tokens(self) -> int:
        return sum(rollout.tokens for rollout in self.rollouts)

    def values(self, metric: str | None) -> list[float]:
        """The metric of every rollout: ``outcome`` of each."""
        return [outcome(rollout, metric) for rollout in self.rollouts]


def outcome(rollout: Rollout, metric: str | None) -> float:
    """A metric of a rollout. ``reward`` is the reward itself; None is ``acc`` where it is returned, else the reward."""
    if metric is None:
        return rollout.metrics.get(OUTCOME, rollout.reward)
    if metric == REWARD:
        return rollout.reward
    try:
        return rollout.metrics[metric]
    except KeyError:
        known = ", ".join(sorted({REWARD, *rollout.metrics}))
        raise ValueError(
            f"algorithm.filter_groups.metric={metric!r} is not accepted: a metric that the reward function "
            f"returned for every rollout of group {rollout.uid}, one of which has {known}"
        ) from None


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation. Groups are small: plain Python beats an array here."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum([(value - mean) ** 2 for value in values]) / len(values))


def is_informative(group: Group) -> bool:
    """Whether the rewards differ: otherwise every advantage is zero."""
    return len(group) > 1 and mean_and_std(group.rewards)[1] > MIN_STD


def signal(group: Group) -> float:
    """Σ(r − r̄)² over the rollouts that are trained; the baseline r̄ is of all."""
    mean, _ = mean_and_std(group.rewards)
    return math.fsum((rollout.reward - mean) ** 2 for rollout in group.trained)


def row_key(uid: str, rollout: int, part: int) -> str:
    """Return verl's name for one row: a rollout of a group has a row for each part of its conversation."""
    return f"{uid}_{rollout}_{part}"


def split_row_key(key: str) -> tuple[str, int]:
    """Return the group and the rollout that a row belongs to."""
    found = ROW_KEY.fullmatch(key)
    if found is None:
        raise ValueError(f"{key!r} is not the name of a row: {{group}}_{{rollout}}_{{part}}")
    return found["group"], int(found["rollout"])


def part_of_row(key: str) -> int:
    """Return which part of its rollout a row is."""
    return int(key.rpartition("_")[2])


def hashed(*parts: object) -> int:
    """Return a hash of 63 bits: a seed that every engine accepts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
