"""Judged groups: kept groups that wait, the batch in hand, and dropped groups that may have to fill a batch up.

Every move of a group moves its tokens in the accounts, and releases its prompt once no group waits on the prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from goldilocks.core.accounts import Accounts
from goldilocks.core.open_groups import FindPrompt, issue_order, pack_group, unpack_group
from goldilocks.core.source import PromptOrder
from goldilocks.errors import require
from goldilocks.types import Account, AccountName, Group, Rollout, Verdict, is_informative

Origin = Account | AccountName
TrainedOf = Callable[[Group], Collection[Rollout]]
Judge = Callable[[Group], Verdict]


class JudgedGroups:
    """Groups by uid. ``trained_of`` returns the rollouts of a group to train; ``spare`` dropped groups are held."""

    def __init__(self, accounts: Accounts, order: PromptOrder, trained_of: TrainedOf, *, spare: int) -> None:
        self._accounts = accounts
        self._claim, self._release = order.claim, order.release
        self._trained_of = trained_of
        self._spare = spare
        self._kept: dict[str, Group] = {}
        self._in_hand: dict[str, tuple[Group, Origin]] = {}  # with the account of its trained rollouts
        self._dropped: dict[str, tuple[Group, Origin]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def kept(self) -> tuple[Group, ...]:
        """The groups that wait, in the order their prompts were issued."""
        return tuple(self._kept[uid] for uid in sorted(self._kept, key=issue_order))

    @property
    def in_hand(self) -> tuple[Group, ...]:
        """The groups of the batch in hand, in the order their prompts were issued."""
        return tuple(self._in_hand[uid][0] for uid in sorted(self._in_hand, key=issue_order))

    @property
    def uids(self) -> set[str]:
        return {*self._kept, *self._in_hand, *self._dropped}

    @property
    def backfilled(self) -> set[str]:
        return {uid for uid, (_, account) in self._in_hand.items() if account == Account.BACKFILLED}

    @property
    def spare(self) -> tuple[Group, ...]:
        return tuple(group for group, _ in self._dropped.values())

    def keep(self, group: Group) -> None:
        self._kept[group.uid] = group
        self._accounts.move(group.rollouts, Account.OPEN, Account.CARRIED)

    def drop(self, group: Group, account: Origin) -> None:
        """Let go of a group that its filter dropped. Some are held to fill a batch up, if they have no gradient.

        A filter on another metric than the reward, or on a band, also drops groups whose rewards differ.
        """
        self._release(group.prompt.index)
        self._accounts.move(group.rollouts, Account.OPEN, account)
        if self._spare and not is_informative(group):
            self._hold(group, account)

    def _hold(self, group: Group, account: Origin) -> None:
        if len(group) and len(self._dropped) < self._spare:
            self._dropped[group.uid] = group, account

    def take(self, count: int) -> list[Group]:
        """Return at most ``count`` of the groups that wait, first issued first."""
        groups = self.kept[:count]
        for group in groups:
            del self._kept[group.uid]
            self._release(group.prompt.index)
        return [self._hand_out(group, Account.CARRIED, Account.TRAINED) for group in groups]

    def backfill(self, count: int) -> list[Group]:
        """Return at most ``count`` groups dropped in this step: the batch keeps its shape, they are not trained."""
        uids = sorted(self._dropped, key=issue_order)[:count]
        return [self._hand_out(*self._dropped.pop(uid), Account.BACKFILLED) for uid in uids]

    def _hand_out(self, group: Group, origin: Origin, account: Origin) -> Group:
        group = replace(group, trained=tuple(self._trained_of(group)))
        self._accounts.move(group.trained, origin, account)
        self._accounts.move(_beyond(group), origin, Account.TRIMMED)
        self._in_hand[group.uid] = group, account
        return group

    def put_back(self) -> None:
        """Let the batch in hand wait again, without the groups that filled it up."""
        in_hand, self._in_hand = self._in_hand, {}
        for group, account in in_hand.values():
            target = Account.FILTERED.because("backfill") if account == Account.BACKFILLED else Account.CARRIED
            self._accounts.move(group.trained, account, target)
            self._accounts.move(_beyond(group), Account.TRIMMED, target)
            if target == Account.CARRIED:
                self._kept[group.uid] = replace(group, trained=())
                self._claim([group.prompt.index])

    def begin_step(self, oldest: int) -> int:
        """Forget the batch in hand, which was trained, and groups older than ``oldest``; return how many expired."""
        self._in_hand.clear()
        self._dropped.clear()
        expired = [group for group in self._kept.values() if group.version < oldest]
        for group in expired:
            del self._kept[group.uid]
            self._release(group.prompt.index)
            self._accounts.move(group.rollouts, Account.CARRIED, Account.EXPIRED)
        return len(expired)

    def reject(self, uid: str, indices: Collection[int] | None, reason: str, judge: Judge, *, flat: bool) -> bool:
        """Take rollouts of a group back: those named, or all. Return whether the group is lost.

        A group is lost if the rest does not pass, or if the group is in hand and none of its trained rollouts is left:
        the caller has not seen the others. A group that is lost because it is ``flat`` may fill a batch up.
        """
        require(uid in self._in_hand or uid in self._kept, "uid", uid, "a group that is in the batch in hand, or kept")
        group = self._in_hand[uid][0] if uid in self._in_hand else self._kept[uid]
        gone = {rollout.index for rollout in group.rollouts} if indices is None else set(indices)
        left = tuple(rollout for rollout in group.rollouts if rollout.index not in gone)
        trained = tuple(rollout for rollout in group.trained if rollout.index not in gone)
        rest = replace(group, rollouts=left, trained=trained)
        untrained = uid in self._in_hand and not trained
        lost = not left or untrained or not judge(rest).keep
        account = self._in_hand[uid][1] if uid in self._in_hand else Account.CARRIED
        beyond = {one.index for one in _beyond(group)} if uid in self._in_hand else set()
        for rollout in group.rollouts:
            if lost or rollout.index in gone:
                origin = Account.TRIMMED if rollout.index in beyond else account
                self._accounts.move([rollout], origin, Account.REJECTED.because(reason))
        if lost:
            if not self._in_hand.pop(uid, None):
                del self._kept[uid]
                self._release(group.prompt.index)
            if flat:
                self._hold(replace(group, trained=()), Account.REJECTED.because(reason))
        elif uid in self._in_hand:
            self._in_hand[uid] = rest, account
        else:
            self._kept[uid] = rest
        return lost

    def trim(self, uid: str, indices: Collection[int]) -> None:
        """Do not train these rollouts of a group in hand; its baseline still counts them."""
        require(uid in self._in_hand, "uid", uid, "a group of the batch in hand")
        group, account = self._in_hand[uid]
        left_out = [rollout for rollout in group.trained if rollout.index in indices]
        trained = tuple(rollout for rollout in group.trained if rollout.index not in indices)
        require(bool(trained), "indices", sorted(indices), f"fewer rollouts of group {uid}: one must be trained")
        self._accounts.move(left_out, account, Account.TRIMMED)
        self._in_hand[uid] = replace(group, trained=trained), account

    def state_dict(self) -> dict[str, Any]:
        return {
            "kept": [pack_group(group) for group in self._kept.values()],
            "in_hand": [(pack_group(group), str(account)) for group, account in self._in_hand.values()],
            "dropped": [(pack_group(group), str(account)) for group, account in self._dropped.values()],
        }

    def load_state_dict(self, state: dict[str, Any], find: FindPrompt) -> None:
        self._kept = {packed["uid"]: unpack_group(packed, find) for packed in state["kept"]}
        for name in ("in_hand", "dropped"):
            groups: dict[str, tuple[Group, Origin]] = {}
            for packed, account in state[name]:
                with contextlib.suppress(ValueError):  # these are trained or dropped: their prompts may leave the data
                    groups[packed["uid"]] = unpack_group(packed, find), AccountName(account)
            setattr(self, f"_{name}", groups)


def _beyond(group: Group) -> list[Rollout]:
    trained = {rollout.index for rollout in group.trained}
    return [rollout for rollout in group.rollouts if rollout.index not in trained]
