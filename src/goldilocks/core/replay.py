"""Groups that are trained again: informative ones of the last few updates, beside the fresh ones of a batch.

A rollout stays in the account where its first training put it; ``ReplayBuffer`` counts further trainings. Which groups
are due is a function of what was trained, so a run that is cut goes on with the same ones. ``Guard`` has the settings
of the guard on such updates; ``goldilocks.algorithms.behaviour`` has the guard itself, which needs tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from goldilocks.core.open_groups import FindPrompt, issue_order, pack_group, unpack_group
from goldilocks.errors import require
from goldilocks.types import Group, Rollout, is_informative, signal

PREFERENCES: dict[str, Callable[[Group], tuple[float, ...]]] = {
    "newest": lambda group: (-group.version, group.replays, issue_order(group.uid)),
    "signal": lambda group: (-signal(group), -group.version, issue_order(group.uid)),
}


@dataclass(frozen=True)
class Replay:
    """Up to ``groups`` groups a batch, at most ``max_age`` updates old, each at most ``max_uses`` times; 0: none."""

    groups: int = 0
    max_age: int = 4
    max_uses: int = 1
    prefer: str = "newest"

    def __post_init__(self) -> None:
        require(self.groups >= 0, "goldilocks.replay.groups", self.groups, "0 (none) or more groups a batch")
        require(self.max_age >= 1, "goldilocks.replay.max_age", self.max_age, "1 or more updates")
        require(self.max_uses >= 1, "goldilocks.replay.max_uses", self.max_uses, "1 or more further trainings")
        known = f"one of {', '.join(PREFERENCES)}"
        require(self.prefer in PREFERENCES, "goldilocks.replay.prefer", self.prefer, known)

    def allows(self, group: Group, step: int) -> bool:
        """Whether a group may be trained again at a step."""
        return group.replays < self.max_uses and step - group.version <= self.max_age


class ReplayBuffer:
    """Groups that were trained and may be trained again, and the replayed groups of the batch in hand."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.rollouts = 0  # trained again since the run began
        self.tokens = 0
        self._groups: dict[str, Group] = {}
        self._in_hand: dict[str, Group] = {}
        self._taken = False  # whether this step has chosen

    @property
    def in_hand(self) -> tuple[Group, ...]:
        """The groups of the batch in hand that are trained again; ``replays`` counts this time too."""
        return tuple(self._in_hand[uid] for uid in sorted(self._in_hand, key=issue_order))

    def take(self, step: int) -> list[Group]:
        """Return the groups to train again at this step; a second call returns none."""
        if self._taken or not self.replay.groups:
            return []
        self._taken = True
        allowed = [group for group in self._groups.values() if self.replay.allows(group, step)]
        for group in sorted(allowed, key=PREFERENCES[self.replay.prefer])[: self.replay.groups]:
            del self._groups[group.uid]
            self._in_hand[group.uid] = replace(group, replays=group.replays + 1)
        return list(self.in_hand)

    def put_back(self) -> None:
        """Let the groups in hand wait again: the batch was not trained after all."""
        self._groups |= {uid: replace(group, replays=group.replays - 1) for uid, group in self._in_hand.items()}
        self._in_hand.clear()
        self._taken = False

    def begin_step(self, trained: Iterable[Group], step: int) -> None:
        """Count the batch in hand as trained, keep its reusable groups and drop groups that are too old."""
        again = [rollout for group in self._in_hand.values() for rollout in group.trained]
        self.rollouts, self.tokens = self.rollouts + len(again), self.tokens + _tokens(again)
        candidates = [*self._groups.values(), *self.reusable(trained)]
        self._groups = {group.uid: group for group in candidates if self.replay.allows(group, step)}
        self._in_hand.clear()
        self._taken = False

    def reusable(self, trained: Iterable[Group]) -> list[Group]:
        """Return the groups of the batch in hand that a later batch may train; ``trained`` are its fresh groups."""
        if not self.replay.groups:
            return []
        batch = (*filter(is_informative, trained), *self._in_hand.values())
        return [group for group in batch if group.replays < self.replay.max_uses]

    @property
    def waiting(self) -> tuple[Group, ...]:
        """The groups that wait to be trained again."""
        return tuple(self._groups.values())

    def metrics(self, step: int) -> dict[str, float]:
        """Return how much of the batch in hand is replayed, its age, and the totals; empty if replay is off."""
        if not self.replay.groups:
            return {}
        again, rows = self.in_hand, [rollout for group in self.in_hand for rollout in group.trained]
        return {
            "replay/groups": len(again),
            "replay/rollouts": len(rows),
            "replay/waiting_groups": len(self._groups),
            "replay/age_mean": _mean([step - group.version for group in again]),
            "replay/age_max": max((step - group.version for group in again), default=0),
            "replay/uses_mean": _mean([group.replays for group in again]),
            "replay/total_rollouts": self.rollouts + len(rows),
            "replay/total_tokens": self.tokens + _tokens(rows),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "groups": [pack_group(group) for group in self._groups.values()],
            "in_hand": [pack_group(group) for group in self._in_hand.values()],
            "taken": self._taken,
            "rollouts": self.rollouts,
            "tokens": self.tokens,
        }

    def load_state_dict(self, state: dict[str, Any], find: FindPrompt) -> None:
        self._groups = {packed["uid"]: unpack_group(packed, find) for packed in state["groups"]}
        self._in_hand = {packed["uid"]: unpack_group(packed, find) for packed in state["in_hand"]}
        self._taken, self.rollouts, self.tokens = state["taken"], state["rollouts"], state["tokens"]


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _tokens(rollouts: Iterable[Rollout]) -> int:
    return sum(rollout.tokens for rollout in rollouts)


@dataclass(frozen=True)
class Guard:
    """``goldilocks.guard``: bounds on the mean of (log π − log π of the policy that wrote the token)²."""

    enable: bool = False
    bound: float = 0.04  # M2PO's; tokens that an update would push further are masked until their mean is within it
    skip: float | None = 0.4  # over all tokens: beyond it the update is not made; None: it always is

    def __post_init__(self) -> None:
        require(self.bound > 0, "goldilocks.guard.bound", self.bound, "a number above 0")
        skips = self.skip is None or self.skip > 0
        require(skips, "goldilocks.guard.skip", self.skip, "a number above 0, or null: never skip")
