"""Judged groups: those kept and waiting, those in the batch in hand, and dropped ones that may have to fill a batch up.

Whatever moves a group here moves its tokens in the accounts, and lets its prompt go once nothing waits on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from goldilocks.core.accounts import Accounts
from goldilocks.core.packing import pack_group, unpack_group
from goldilocks.core.pool import Pool
from goldilocks.types import Group, Prompt, Rollout

Trim = Callable[[Group], Collection[Rollout]]


class Shelf:
    """Groups by uid. The pool is told of each prompt that no longer waits; ``spare`` dropped groups are held."""

    def __init__(self, accounts: Accounts, pool: Pool, *, spare: int) -> None:
        self._accounts = accounts
        self._claim, self._release = pool.claim, pool.release
        self._spare = spare
        self._kept: dict[str, Group] = {}
        self._in_hand: dict[str, tuple[Group, str]] = {}  # with the account of what it trains
        self._dropped: dict[str, tuple[Group, str]] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._kept)

    @property
    def kept(self) -> tuple[Group, ...]:
        """Those that wait, in the order their prompts were issued."""
        return tuple(self._kept[uid] for uid in sorted(self._kept, key=issue_order))

    @property
    def in_hand(self) -> tuple[Group, ...]:
        """Those of the batch in hand, in the order their prompts were issued."""
        return tuple(self._in_hand[uid][0] for uid in sorted(self._in_hand, key=issue_order))

    @property
    def uids(self) -> set[str]:
        """Those that wait and those in hand."""
        return {*self._kept, *self._in_hand}

    def keep(self, group: Group) -> None:
        """It passed: it waits."""
        self._kept[group.uid] = group
        self._accounts.move("open", "carried", len(group), group.tokens)

    def drop(self, group: Group, account: str) -> None:
        """It did not pass."""
        self._release(group.prompt.index)
        self._accounts.move("open", account, len(group), group.tokens)
        if len(group) and len(self._dropped) < self._spare:
            self._dropped[group.uid] = group, account

    def take(self, count: int, trim: Trim) -> list[Group]:
        """At most ``count`` of those that wait, first issued first; ``trim`` says which rollouts are trained."""
        groups = self.kept[:count]
        for group in groups:
            del self._kept[group.uid]
            self._release(group.prompt.index)
        return [self._hand_out(group, "carried", "trained", trim) for group in groups]

    def backfill(self, count: int, trim: Trim) -> list[Group]:
        """At most ``count`` of those dropped in this step: the batch keeps its shape, they have no gradient."""
        uids = sorted(self._dropped, key=issue_order)[:count]
        return [self._hand_out(*self._dropped.pop(uid), "backfilled", trim) for uid in uids]

    def _hand_out(self, group: Group, origin: str, account: str, trim: Trim) -> Group:
        group = replace(group, trained=tuple(trim(group)))
        tokens = sum(rollout.tokens for rollout in group.trained)
        self._accounts.move(origin, account, len(group.trained), tokens)
        self._accounts.move(origin, "trimmed", len(group) - len(group.trained), group.tokens - tokens)
        self._in_hand[group.uid] = group, account
        return group

    def put_back(self) -> int:
        """The batch in hand waits again, less what only filled it up. Returns how many groups were in hand."""
        in_hand = list(self._in_hand.values())
        for group, account in in_hand:
            del self._in_hand[group.uid]
            tokens = sum(rollout.tokens for rollout in group.trained)
            target = "filtered/backfill" if account == "backfilled" else "carried"
            self._accounts.move(account, target, len(group.trained), tokens)
            self._accounts.move("trimmed", target, len(group) - len(group.trained), group.tokens - tokens)
            if target == "carried":
                self._kept[group.uid] = replace(group, trained=())
                self._claim([group.prompt.index])
        return len(in_hand)

    def begin_step(self, oldest: int) -> int:
        """The batch in hand was trained; those that wait and are older than ``oldest`` expire. Returns how many did."""
        self._in_hand.clear()
        self._dropped.clear()
        expired = [group for group in self._kept.values() if group.version < oldest]
        for group in expired:
            del self._kept[group.uid]
            self._release(group.prompt.index)
            self._accounts.move("carried", "expired", len(group), group.tokens)
        return len(expired)

    def find(self, uid: str) -> Group:
        """A group that waits or is in hand."""
        group = self._in_hand[uid][0] if uid in self._in_hand else self._kept.get(uid)
        if group is None:
            raise ValueError(f"uid={uid!r} is neither in the batch in hand nor kept: it cannot be rejected")
        return group

    def shorten(self, group: Group, rest: Group, reason: str) -> None:
        """Part of a group is rejected; the rest stays where it was."""
        staying = {rollout.index for rollout in rest.rollouts}
        self._charge(group, [rollout for rollout in group.rollouts if rollout.index not in staying], reason)
        if group.uid in self._in_hand:
            self._in_hand[group.uid] = rest, self._in_hand[group.uid][1]
        else:
            self._kept[group.uid] = rest

    def reject(self, group: Group, reason: str) -> bool:
        """The whole group is rejected. True if it was in the batch in hand, which now lacks one."""
        self._charge(group, group.rollouts, reason)
        if self._in_hand.pop(group.uid, None):
            return True
        del self._kept[group.uid]
        self._release(group.prompt.index)
        return False

    def _charge(self, group: Group, rollouts: Collection[Rollout], reason: str) -> None:
        waiting = group.uid in self._kept
        account = "carried" if waiting else self._in_hand[group.uid][1]
        trained = {rollout.index for rollout in group.trained}
        for rollout in rollouts:
            origin = account if waiting or rollout.index in trained else "trimmed"
            self._accounts.move(origin, f"rejected/{reason}", 1, rollout.tokens)

    def state_dict(self) -> dict[str, Any]:
        return {
            "kept": [pack_group(group) for group in self._kept.values()],
            "in_hand": [(pack_group(group), account) for group, account in self._in_hand.values()],
            "dropped": [(pack_group(group), account) for group, account in self._dropped.values()],
        }

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[dict[str, Any]], Prompt]) -> None:
        """``prompt`` finds the prompt that a packed group is about."""

        def unpack(packed: dict[str, Any]) -> Group:
            return unpack_group(packed, prompt(packed))

        self._kept = {packed["uid"]: unpack(packed) for packed in state["kept"]}
        self._in_hand = {packed["uid"]: (unpack(packed), account) for packed, account in state["in_hand"]}
        self._dropped = {packed["uid"]: (unpack(packed), account) for packed, account in state["dropped"]}


def issue_order(uid: str) -> int:
    """The order in which a group's prompt was issued is its name."""
    return int(uid[1:])
