"""The prompts that come next, and the groups that wait for rollouts: which each has, and which are still to be sent.

Every rollout has an index, given when it is asked for. Rollouts count in the order of their indices, not in the order
of arrival: ``rollouts`` is the prefix of indices that have all arrived, and policies see only the prefix. Otherwise
short answers, which arrive first, would decide when a group stops.

An index is in exactly one of four places: settled (below ``settled``), ``ahead`` (arrived, with a gap before it),
``in_flight`` (at the engine) or ``unsent``. A rollout that failed is asked for again under a new index.

Groups and rollouts are saved as JSON values; a payload must be one too. A saved group names its prompt by key and
index. ``find_prompt`` finds the prompt in today's data, which may have another order.
"""

from __future__ import annotations

import math
import reprlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from goldilocks.core.allocators import Allocator
from goldilocks.core.beliefs import Beliefs
from goldilocks.core.policy import place_of
from goldilocks.core.selectors import Selector
from goldilocks.core.source import KeyedPositions, PromptOrder, Source
from goldilocks.types import Failure, Group, Prompt, Request, Rollout

FindPrompt = Callable[[Mapping[str, Any]], Prompt]  # the prompt of a packed group


@dataclass(slots=True)
class OpenGroup:
    """One visit to one prompt, from the first request to the verdict."""

    uid: str
    prompt: Prompt
    planned: int
    version: int
    number: int = 0  # how many visits to the prompt were issued before this one
    rollouts: list[Rollout] = field(default_factory=list)
    learnt: int = 0  # of its rollouts, how many beliefs have learnt from
    settled: int = 0
    ahead: dict[int, Rollout | None] = field(default_factory=dict)  # None: the rollout failed
    in_flight: set[int] = field(default_factory=set)
    unsent: list[int] = field(default_factory=list)
    asks: int = 0
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
        """Ask for more; ``failed``: how often the rollout that this is for has failed."""
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
        return Request(self.uid, self.prompt, n, first, self.number)

    def advance(self) -> int | None:
        """Move the prefix on by every index that has arrived; return how often a rollout that failed has failed now.

        Stops at a failed one, so that it can be asked for again; None: none failed.
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
        """Return the group as policies see it while it is open. Made once: its list of rollouts grows under it."""
        if self._view is None:
            self._view = Group(self.uid, self.prompt, self.rollouts, self.planned, self.version)
        return self._view

    def close(self) -> Group:
        """Return the finished group: the prefix, and nothing that arrived ahead of it."""
        group = Group(self.uid, self.prompt, tuple(self.rollouts), self.planned, self.version)
        group.counted[:] = self.view().counted
        return group

    def pack(self) -> dict[str, Any]:
        plain = ("uid", "planned", "version", "number", "learnt", "settled", "asks", "lost")
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
        given["rollouts"] = [unpack_rollout(uid, one) for one in packed["rollouts"]]
        given["ahead"] = {index: one and unpack_rollout(uid, one) for index, one in packed["ahead"]}
        given["in_flight"], given["unsent"] = set(packed["in_flight"]), list(packed["unsent"])
        given["tries"] = dict(packed["tries"])
        return cls(prompt=find(packed), **given)


def group_name(number: int) -> str:
    return f"g{number}"


def issue_order(uid: str) -> int:
    """Return the number that ``group_name`` was given: the order in which prompts were issued."""
    return int(uid[1:])


def was_issued(uid: str, prompts_issued: int) -> bool:
    """Whether ``uid`` names one of the first ``prompts_issued`` groups."""
    return uid[:1] == "g" and uid[1:].isdecimal() and issue_order(uid) < prompts_issued


class OpenGroups:
    """Open groups by uid, in the order they were opened, with running counts: no request scans all of them."""

    def __init__(self, whole: int) -> None:
        """``whole``: how many rollouts a group has that is not given up early."""
        self.in_flight = 0
        self.unsent = 0
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
        """The version of the group that was opened first; infinite if none is open."""
        return next((group.version for group in self), math.inf)

    @property
    def waiting(self) -> list[OpenGroup]:
        """The groups with unsent rollouts, in the order in which these are sent."""
        return [self._groups[uid] for uid in (*self._growing, *self._opening)]

    @property
    def lost(self) -> int:
        """How many of the rollouts in flight the engine has lost and was not asked for again yet."""
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
            "visits": [group.pack() for group in self],
            "growing": list(self._growing),
            "opening": list(self._opening),
            "again": [[uid, list(indices)] for uid, indices in self._again.items()],
            "cancelled": list(self._cancelled),
        }

    def load_state_dict(self, state: dict[str, Any], find: FindPrompt) -> None:
        groups = [OpenGroup.unpack(packed, find) for packed in state["visits"]]
        self._groups = {group.uid: group for group in groups}
        self._growing, self._opening = dict.fromkeys(state["growing"]), dict.fromkeys(state["opening"])
        self._asked = sum(min(group.asked, self._whole) for group in groups)
        self._again = {uid: list(indices) for uid, indices in state["again"]}
        self._cancelled = list(state["cancelled"])
        self.in_flight = sum(len(group.in_flight) for group in groups)
        self.unsent = sum(len(group.unsent) for group in groups)


def find_prompt(source: Source, positions: KeyedPositions, packed: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a packed group; an error if the prompt is gone from the data."""
    index = positions.find_one(packed["key"], packed["index"])
    if index < 0:
        raise ValueError(
            f"group {packed['uid']} of the saved state is about a prompt (key {packed['key']}) "
            f"that is not among the {len(source)} prompts of this data set"
        )
    return source[index]


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
    rollouts = tuple(unpack_rollout(uid, one) for one in packed["rollouts"])
    trained = tuple(rollout for rollout in rollouts if rollout.index in chosen)
    return Group(uid, find(packed), rollouts, packed["planned"], packed["version"], trained)


def pack_rollout(rollout: Rollout) -> list[Any]:
    r = rollout
    return [r.index, r.reward, r.tokens, dict(r.metrics), r.truncated, r.version, r.payload]


def unpack_rollout(uid: str, packed: list[Any]) -> Rollout:
    return Rollout(uid, *packed)


class PromptQueue:
    """Hands out ``(index, n, again)``: a prompt that is not open, the rollouts to ask for, whether it was out before.

    The selector and the allocator are consulted once for each generation batch. A cancelled prompt returns to the head.
    """

    def __init__(
        self, order: PromptOrder, selector: Selector, allocator: Allocator, beliefs: Beliefs, *, batch: int, seed: int
    ) -> None:
        self._order = order
        self._selector = selector
        self._allocator = allocator
        self._beliefs = beliefs
        self._batch = batch
        self._rng = np.random.default_rng(seed)
        self._waiting: deque[tuple[int, int, bool]] = deque()

    def head(self) -> tuple[int, int, bool] | None:
        """Return the next prompt without removing it; None when there are no more."""
        if not self._waiting:
            self._choose()
        return self._waiting[0] if self._waiting else None

    @property
    def indices(self) -> list[int]:
        return [index for index, _, _ in self._waiting]

    @property
    def returned(self) -> int:
        """How many prompts were put back and are still to be visited again."""
        return sum(again for _, _, again in self._waiting)

    def pop(self) -> tuple[int, int, bool]:
        return self._waiting.popleft()

    def put_back(self, index: int, n: int) -> None:
        """Visit a prompt next, because its visit was cancelled."""
        self._waiting.appendleft((index, n, True))

    def _choose(self) -> None:
        choose, first, most = self._selector.choose, self._allocator.first, self._order.size - 1
        found = choose(self._order, self._beliefs, self._batch, self._rng)
        rows = np.asarray(found)
        whole = rows.ndim == 1 and (rows.dtype.kind in "iu" or not len(rows))
        for bad in rows[(rows < 0) | (rows > most)].tolist() if whole else [found]:
            accepted = f"accepted: places of prompts, whole numbers from 0 to {most}"
            raise ValueError(f"{place_of(choose)} returned {reprlib.repr(bad)}; {accepted}")
        sizes = first(rows, self._beliefs)
        if len(sizes) != len(rows) or any(n < 1 for n in sizes):
            said = f"{place_of(first)} returned {list(sizes)} for {len(rows)} prompts"
            raise ValueError(f"{said}; accepted: 1 or more for each")
        chosen = [int(row) for row in rows]
        self._order.claim(chosen)
        self._waiting.extend((index, n, False) for index, n in zip(chosen, sizes, strict=True))

    def state_dict(self) -> dict[str, Any]:
        keys = self._beliefs.keys
        waiting = [(index, n, again, int(keys[index])) for index, n, again in self._waiting]
        return {"rng": self._rng.bit_generator.state, "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Prompts that are gone from the data are dropped."""
        self._rng.bit_generator.state = state["rng"]
        positions = KeyedPositions(self._beliefs.keys)
        found = ((positions.find_one(key, index), n, again) for index, n, again, key in state["waiting"])
        self._waiting = deque(one for one in found if one[0] >= 0)
