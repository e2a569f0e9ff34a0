"""Groups, from the first request to the batch in hand: open ones wait for rollouts, judged ones to be trained.

Every rollout has an index, given when it is asked for. Rollouts count in the order of their indices, not in the order
of arrival: ``rollouts`` is the prefix of indices that have all arrived, and policies see only the prefix. Otherwise
short answers, which arrive first, would decide when a group stops.

An index is in exactly one of four places: settled (below ``settled``), ``ahead`` (arrived, with a gap before it),
``in_flight`` (at the engine) or ``unsent``. A rollout that failed is asked for again under a new index.

A judged group is kept or dropped. Kept groups are taken in hand, then trained or put back; dropped ones may fill up a
batch. When a group changes state its tokens change accounts. Its prompt is released when no group holds it.

Groups and rollouts are saved as JSON values; a payload must be one too. A saved group names its prompt by key and
index; ``core.source.find_prompt`` finds it in today's data, which may have another order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from goldilocks.core.accounts import Accounts
from goldilocks.core.source import PromptOrder
from goldilocks.errors import require
from goldilocks.types import Account, AccountName, Failure, Group, Prompt, Request, Rollout, Verdict, is_informative

FindPrompt = Callable[[Mapping[str, Any]], Prompt]  # the prompt of a packed group
AnyAccount = Account | AccountName
ChooseTrained = Callable[[Group], Collection[Rollout]]
Judge = Callable[[Group], Verdict]


# -- open groups -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OpenGroup:
    """One visit to one prompt, from the first request to the verdict."""

    uid: str
    prompt: Prompt
    planned: int
    version: int
    visit: int = 0  # how many visits to the prompt were issued before this one
    rollouts: list[Rollout] = field(default_factory=list)
    learnt: int = 0  # of its rollouts, how many beliefs have learnt from
    settled: int = 0  # indices below it are in ``rollouts``, or failed
    ahead: dict[int, Rollout | None] = field(default_factory=dict)  # None: the rollout failed
    in_flight: set[int] = field(default_factory=set)
    unsent: list[int] = field(default_factory=list)
    asks: int = 0  # times that the allocator has asked
    tries: dict[int, int] = field(default_factory=dict)  # of a rollout that is asked for again: how often it failed
    lost: int = 0  # rollouts that failed too often to be asked for again
    _view: Group | None = field(default=None, repr=False)

    @property
    def asked(self) -> int:
        """How many rollouts were ever asked for; the next index."""
        return self.settled + self.pending

    @property
    def pending(self) -> int:
        return len(self.ahead) + len(self.in_flight) + len(self.unsent)

    @property
    def arrived(self) -> list[Rollout]:
        """Every rollout that arrived, in the prefix or ahead of it."""
        return [*self.rollouts, *(rollout for rollout in self.ahead.values() if rollout is not None)]

    def ask(self, n: int, failed: int = 0) -> None:
        """Ask for more; ``failed``: failures of the rollout that this one replaces."""
        first = self.asked
        self.unsent += range(first, first + n)
        if failed:
            self.tries[first] = failed
        else:
            self.asks += 1

    def send(self, most: int) -> Request:
        """Return a request for the first unsent indices, which are in flight from here on."""
        request = self.request(self.unsent, most)
        self.in_flight.update(self.unsent[: request.n])
        del self.unsent[: request.n]
        return request

    def request(self, indices: list[int], most: int) -> Request:
        """Return a request for the first of these indices: as many as are consecutive, at most ``most``."""
        first, n = indices[0], 1
        while n < min(most, len(indices)) and indices[n] == first + n:
            n += 1
        return Request(self.uid, self.prompt, n, first, self.visit)

    def advance(self) -> int | None:
        """Move the prefix on by every index that has arrived, up to the first that failed.

        Return how often that one has failed now, so that it can be asked for again; None: none failed.
        """
        while self.settled in self.ahead:
            index, rollout = self.settled, self.ahead.pop(self.settled)
            self.settled += 1
            if rollout is None:
                return self.tries.pop(index, 0) + 1
            self.tries.pop(index, None)
            self.rollouts.append(rollout)
            if rollout.version is not None and rollout.version < self.version:
                self.version = rollout.version
                self._view = None
        return None

    def view(self) -> Group:
        """Return the group as policies see it while it is open: made once, as its list of rollouts grows under it."""
        if self._view is None:
            self._view = Group(self.uid, self.prompt, self.rollouts, self.planned, self.version)
        return self._view

    def finished(self) -> Group:
        """Return the finished group: the prefix, and nothing that arrived ahead of it."""
        group = Group(self.uid, self.prompt, tuple(self.rollouts), self.planned, self.version)
        group.counted[:] = self.view().counted
        return group

    def pack(self) -> dict[str, Any]:
        plain = ("uid", "planned", "version", "visit", "learnt", "settled", "asks", "lost")
        return {
            **{name: getattr(self, name) for name in plain},
            "key": self.prompt.key,
            "index": self.prompt.index,
            "rollouts": [pack_rollout(rollout) for rollout in self.rollouts],
            "ahead": [[index, one and pack_rollout(one)] for index, one in self.ahead.items()],
            "in_flight": sorted(self.in_flight),
            "unsent": list(self.unsent),
            "tries": list(self.tries.items()),
        }

    @classmethod
    def unpack(cls, packed: dict[str, Any], find: FindPrompt) -> OpenGroup:
        uid, given = packed["uid"], {name: value for name, value in packed.items() if name not in ("key", "index")}
        given["rollouts"] = [Rollout(uid, *one) for one in packed["rollouts"]]
        given["ahead"] = {index: one and Rollout(uid, *one) for index, one in packed["ahead"]}
        given |= {"in_flight": set(packed["in_flight"]), "unsent": [*packed["unsent"]], "tries": dict(packed["tries"])}
        return cls(prompt=find(packed), **given)


def group_name(number: int) -> str:
    return f"g{number}"


def issue_order(uid: str) -> int:
    """Return the number that ``group_name`` was given: the order in which prompts were issued."""
    return int(uid[1:])


def was_opened(uid: str, opened: int) -> bool:
    """Whether ``uid`` names one of the first ``opened`` groups."""
    return uid[:1] == "g" and uid[1:].isdecimal() and issue_order(uid) < opened


class OpenGroups:
    """Open groups by uid, in the order they were opened, with running counts: no request scans all of them."""

    def __init__(self, whole: int) -> None:
        """``whole``: how many rollouts a group has that is not given up early."""
        self.in_flight = self.unsent = 0
        self._whole = whole
        self._asked = 0  # rollouts, at most ``whole`` of each group
        self._groups: dict[str, OpenGroup] = {}
        # Groups with unsent rollouts, in the order they wanted them. Those that grow are before those that are opened.
        self._growing: dict[str, None] = {}
        self._opening: dict[str, None] = {}
        self._again: dict[str, list[int]] = {}  # by group, the indices in flight that the engine has lost
        self._cancelled: list[str] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[OpenGroup]:
        return iter(self._groups.values())

    def __contains__(self, uid: str) -> bool:
        return uid in self._groups

    def get(self, uid: str) -> OpenGroup | None:
        return self._groups.get(uid)

    @property
    def size(self) -> float:
        """How many whole groups they amount to, by the rollouts that were asked for."""
        return self._asked / self._whole

    @property
    def oldest(self) -> float:
        """The version of the oldest group, which may have been opened later; infinite if none is open."""
        return min((group.version for group in self), default=math.inf)

    @property
    def waiting(self) -> list[OpenGroup]:
        """The groups with unsent rollouts, in the order in which these are sent."""
        return [self._groups[uid] for uid in (*self._growing, *self._opening)]

    @property
    def lost(self) -> int:
        """How many of the rollouts in flight the engine has lost, and was not yet asked for again."""
        return sum(map(len, self._again.values()))

    def open(self, group: OpenGroup) -> None:
        self._groups[group.uid] = group
        self._opening[group.uid] = None
        self._ask(group, group.planned)

    def want(self, group: OpenGroup, n: int, failed: int = 0) -> None:
        """Ask for more rollouts of a group; ``failed``: how often the rollout that this is for has failed."""
        if group.uid not in self._opening:
            self._growing[group.uid] = None
        self._ask(group, n, failed)

    def _ask(self, group: OpenGroup, n: int, failed: int = 0) -> None:
        before = min(group.asked, self._whole)
        group.ask(n, failed)
        self._asked += min(group.asked, self._whole) - before
        self.unsent += n

    def send(self, room: float) -> list[Request]:
        """Return requests for unsent rollouts, at most ``room`` of them."""
        sent: list[Request] = []
        while (waiting := self._growing or self._opening) and room > 0:
            group = self._groups[next(iter(waiting))]
            request = group.send(int(min(len(group.unsent), room)))
            if not group.unsent:
                del waiting[group.uid]
            room -= request.n
            self.unsent -= request.n
            self.in_flight += request.n
            sent.append(request)
        return sent

    def arrive(self, group: OpenGroup, event: Rollout | Failure) -> None:
        group.in_flight.remove(event.index)
        group.ahead[event.index] = event if isinstance(event, Rollout) else None
        if event.index in self._again.get(group.uid, ()):
            self._again[group.uid].remove(event.index)
        self.in_flight -= 1

    def close(self, group: OpenGroup) -> None:
        """Remove a group and cancel its rollouts in flight."""
        del self._groups[group.uid]
        self._growing.pop(group.uid, None)
        self._opening.pop(group.uid, None)
        self._asked -= min(group.asked, self._whole)
        self._again.pop(group.uid, None)
        self.unsent -= len(group.unsent)
        self.in_flight -= len(group.in_flight)
        if group.in_flight:
            self._cancelled.append(group.uid)

    def cancelled(self) -> list[str]:
        """Return the groups closed with rollouts in flight since this was last asked."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def lose(self) -> None:
        """Note that the engine has lost everything in flight. The groups still count it as in flight."""
        self._again = {group.uid: sorted(group.in_flight) for group in self if group.in_flight}

    def send_again(self, room: float) -> list[Request]:
        """Return requests for rollouts that the engine has lost, at most ``room`` of them."""
        sent: list[Request] = []
        while self._again and room > 0:
            uid, indices = next(iter(self._again.items()))
            if indices:
                request = self._groups[uid].request(indices, int(min(len(indices), room)))
                del indices[: request.n]
                room -= request.n
                sent.append(request)
            if not indices:
                del self._again[uid]
        return sent

    def state_dict(self) -> dict[str, Any]:
        return {
            "groups": [group.pack() for group in self],
            "growing": list(self._growing),
            "opening": list(self._opening),
            "again": [[uid, list(indices)] for uid, indices in self._again.items()],
            "cancelled": list(self._cancelled),
        }

    def load_state_dict(self, state: dict[str, Any], find: FindPrompt) -> None:
        groups = [OpenGroup.unpack(packed, find) for packed in state["groups"]]
        self._groups = {group.uid: group for group in groups}
        self._growing, self._opening = dict.fromkeys(state["growing"]), dict.fromkeys(state["opening"])
        self._asked = sum(min(group.asked, self._whole) for group in groups)
        self._again, self._cancelled = {uid: [*lost] for uid, lost in state["again"]}, list(state["cancelled"])
        self.in_flight = sum(len(group.in_flight) for group in groups)
        self.unsent = sum(len(group.unsent) for group in groups)


# -- judged groups -----------------------------------------------------------------------------------------------------


class JudgedGroups:
    """Groups by uid. ``trained_of``: a group's rollouts to train. ``spares``: the most dropped groups that are held."""

    def __init__(self, accounts: Accounts, order: PromptOrder, trained_of: ChooseTrained, *, spares: int) -> None:
        self._accounts = accounts
        self._claim, self._release = order.claim, order.release
        self._trained_of = trained_of
        self._spares = spares
        self._kept: dict[str, Group] = {}
        self._in_hand: dict[str, tuple[Group, AnyAccount]] = {}  # with the account of its trained rollouts
        self._earlier: set[str] = set()  # those in hand that are of earlier batches of the update
        self._spare: dict[str, tuple[Group, AnyAccount]] = {}  # dropped in this step, with their account

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def kept(self) -> tuple[Group, ...]:
        """The groups that wait, in the order their prompts were issued."""
        return tuple(self._kept[uid] for uid in sorted(self._kept, key=issue_order))

    @property
    def in_hand(self) -> tuple[Group, ...]:
        """The groups of the batch in hand, in the order their prompts were issued."""
        return tuple(self._in_hand[uid][0] for uid in sorted(self._in_hand.keys() - self._earlier, key=issue_order))

    @property
    def trained(self) -> list[Group]:
        """The groups that the update trains, of all its batches, without those that only fill them up."""
        taken = sorted(self._in_hand.values(), key=lambda held: issue_order(held[0].uid))
        return [group for group, account in taken if account != Account.BACKFILLED]

    @property
    def uids(self) -> set[str]:
        return {*self._kept, *self._in_hand, *self._spare}

    @property
    def backfilled(self) -> set[str]:
        return {uid for uid, (_, account) in self._in_hand.items() if account == Account.BACKFILLED} - self._earlier

    @property
    def spare(self) -> tuple[Group, ...]:
        return tuple(group for group, _ in self._spare.values())

    def keep(self, group: Group) -> None:
        self._kept[group.uid] = group
        self._accounts.move(group.rollouts, Account.OPEN, Account.CARRIED)

    def drop(self, group: Group, account: AnyAccount) -> None:
        """Let go of a group that its filter dropped; hold it as a spare one if it has no gradient.

        A filter on another metric than the reward, or on a band, also drops groups whose rewards differ.
        """
        self._release(group.prompt.index)
        self._accounts.move(group.rollouts, Account.OPEN, account)
        if self._spares and not is_informative(group):
            self._hold_spare(group, account)

    def _hold_spare(self, group: Group, account: AnyAccount) -> None:
        if len(group) and len(self._spare) < self._spares:
            self._spare[group.uid] = group, account

    def take(self, count: int) -> list[Group]:
        """Return at most ``count`` of the groups that wait, first issued first."""
        uids = sorted(self._kept, key=issue_order)[:count]
        return [self._hand_out(self._kept.pop(uid), Account.CARRIED, Account.TRAINED) for uid in uids]

    def backfill(self, count: int) -> list[Group]:
        """Return at most ``count`` spare groups: the batch keeps its shape, they are not trained."""
        uids = sorted(self._spare, key=issue_order)[:count]
        return [self._hand_out(*self._spare.pop(uid), Account.BACKFILLED) for uid in uids]

    def _hand_out(self, group: Group, origin: AnyAccount, account: AnyAccount) -> Group:
        group = replace(group, trained=tuple(self._trained_of(group)))
        self._accounts.move(group.trained, origin, account)
        self._accounts.move(_beyond(group), origin, Account.TRIMMED)
        self._in_hand[group.uid] = group, account
        return group

    def extend(self) -> None:
        """Let another batch of the update follow the one in hand, also of the same prompts."""
        self._release_taken()
        self._earlier = set(self._in_hand)

    def _release_taken(self) -> None:
        for group in self.trained:  # a group that fills a batch up has released its prompt when it was dropped
            if group.uid not in self._earlier:
                self._release(group.prompt.index)

    def put_back(self) -> None:
        """Let all batches of the update wait again, without the groups that filled them up."""
        self._release_taken()
        in_hand, self._in_hand, self._earlier = self._in_hand, {}, set()
        for group, account in in_hand.values():
            target = Account.FILTERED.because("backfill") if account == Account.BACKFILLED else Account.CARRIED
            self._accounts.move(group.trained, account, target)
            self._accounts.move(_beyond(group), Account.TRIMMED, target)
            if target == Account.CARRIED:
                self._kept[group.uid] = replace(group, trained=())
                self._claim([group.prompt.index])

    def begin_step(self, oldest: int) -> int:
        """Forget the batches taken, spare groups and kept ones older than ``oldest``; return how many expired."""
        self._release_taken()
        self._in_hand, self._earlier, self._spare = {}, set(), {}
        expired = [self._kept.pop(group.uid) for group in self.kept if group.version < oldest]
        for group in expired:
            self._release(group.prompt.index)
            self._accounts.move(group.rollouts, Account.CARRIED, Account.EXPIRED)
        return len(expired)

    def reject(self, uid: str, indices: Collection[int] | None, reason: str, judge: Judge, *, flat: bool) -> bool:
        """Take rollouts of a group back: those named, or all. Return whether the group is lost.

        A group is lost if the rest does not pass, or if the group is in hand and none of its trained rollouts is left:
        the caller has not seen the others. A group that is lost because it is ``flat`` may fill a batch up.
        """
        in_hand = uid in self._in_hand
        require(in_hand or uid in self._kept, "uid", uid, "a group that is in the batch in hand, or kept")
        group, account = self._in_hand[uid] if in_hand else (self._kept[uid], Account.CARRIED)
        gone = {rollout.index for rollout in group.rollouts} if indices is None else set(indices)
        left = tuple(rollout for rollout in group.rollouts if rollout.index not in gone)
        trained = tuple(rollout for rollout in group.trained if rollout.index not in gone)
        rest = replace(group, rollouts=left, trained=trained)
        lost = not left or (in_hand and not trained) or not judge(rest).keep
        beyond = {one.index for one in _beyond(group)} if in_hand else set()
        for rollout in group.rollouts:
            if lost or rollout.index in gone:
                origin = Account.TRIMMED if rollout.index in beyond else account
                self._accounts.move([rollout], origin, Account.REJECTED.because(reason))
        if lost:
            del (self._in_hand if in_hand else self._kept)[uid]
            if account != Account.BACKFILLED and uid not in self._earlier:
                self._release(group.prompt.index)
            if flat:
                self._hold_spare(replace(group, trained=()), Account.REJECTED.because(reason))
        elif in_hand:
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
            "spare": [(pack_group(group), str(account)) for group, account in self._spare.values()],
        }

    def load_state_dict(self, state: dict[str, Any], find: FindPrompt) -> None:
        self._kept, self._earlier = {one["uid"]: unpack_group(one, find) for one in state["kept"]}, set()
        for name, groups in (("in_hand", self._in_hand), ("spare", self._spare)):
            groups.clear()
            for packed, account in state[name]:
                with contextlib.suppress(ValueError):  # these are trained or dropped: their prompts may leave the data
                    groups[packed["uid"]] = unpack_group(packed, find), AccountName(account)


def _beyond(group: Group) -> list[Rollout]:
    """Return the rollouts of a group in hand that are not trained."""
    trained = {rollout.index for rollout in group.trained}
    return [rollout for rollout in group.rollouts if rollout.index not in trained]


# -- on disk -----------------------------------------------------------------------------------------------------------


def pack_group(group: Group) -> dict[str, Any]:
    return {
        "uid": group.uid,
        "key": group.prompt.key,
        "index": group.prompt.index,
        "rollouts": [pack_rollout(rollout) for rollout in group.rollouts],
        "planned": group.planned,
        "version": group.version,
        "trained": [rollout.index for rollout in group.trained],
    }


def unpack_group(packed: Mapping[str, Any], find: FindPrompt) -> Group:
    uid, chosen = packed["uid"], set(packed["trained"])
    rollouts = tuple(Rollout(uid, *one) for one in packed["rollouts"])
    trained = tuple(rollout for rollout in rollouts if rollout.index in chosen)
    return Group(uid, find(packed), rollouts, packed["planned"], packed["version"], trained)


def pack_rollout(r: Rollout) -> list[Any]:
    return [r.index, r.reward, r.tokens, dict(r.metrics), r.truncated, r.version, r.payload]
