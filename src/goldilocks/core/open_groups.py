"""The prompts that come next, and the groups that wait for rollouts: which each has, and which are still to be sent.

Every rollout has an index, given when it is asked for. Rollouts count in the order of their indices, not in the order
of arrival: ``rollouts`` is the prefix of indices that have all arrived, and policies see only the prefix. Otherwise
short answers, which arrive first, would decide when a group stops.

An index is in exactly one of four places: settled (below ``settled``), ``ahead`` (arrived, with a gap before it),
``in_flight`` (at the engine) or ``unsent``.

Groups and rollouts are saved as JSON values; a payload must be one too. A saved group names its prompt by key and
index. ``find_prompt`` finds the prompt in today's data, which may have another order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from goldilocks.core.allocators import Allocator
from goldilocks.core.beliefs import Beliefs
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
    settled: int = 0
    ahead: dict[int, Rollout | None] = field(default_factory=dict)  # None: the rollout failed
    in_flight: set[int] = field(default_factory=set)
    unsent: list[int] = field(default_factory=list)
    asks: int = 0
    failures: int = 0
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

    def ask(self, n: int) -> None:
        self.unsent += range(self.asked, self.asked + n)
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

    def arrive(self, event: Rollout | Failure) -> None:
        self.in_flight.remove(event.index)
        self.ahead[event.index] = event if isinstance(event, Rollout) else None

    def advance(self) -> bool:
        """Move the next index into the prefix, or count it as failed. Return False if it has not arrived."""
        if self.settled not in self.ahead:
            return False
        rollout = self.ahead.pop(self.settled)
        self.settled += 1
        if rollout is None:
            self.failures += 1
            return True
        self.rollouts.append(rollout)
        if rollout.version is not None and rollout.version < self.version:
            self.version = rollout.version
            self._view = None
        return True

    def view(self) -> Group:
        """Return the group as policies see it while it is open. Made once: its list of rollouts grows under it."""
        if self._view is None:
            self._view = Group(self.uid, self.prompt, self.rollouts, self.planned, self.version)
        return self._view

    def close(self) -> Group:
        """Return the finished group: the prefix, and nothing that arrived ahead of it."""
        return Group(self.uid, self.prompt, tuple(self.rollouts), self.planned, self.version)

    def pack(self) -> dict[str, Any]:
        plain = ("uid", "planned", "version", "number", "settled", "asks", "failures")
        return {
            **{name: getattr(self, name) for name in plain},
            "key": self.prompt.key,
            "index": self.prompt.index,
            "rollouts": [pack_rollout(rollout) for rollout in self.rollouts],
            "ahead": [[index, one and pack_rollout(one)] for index, one in self.ahead.items()],
            "in_flight": sorted(self.in_flight),
            "unsent": list(self.unsent),
        }

    @classmethod
    def unpack(cls, packed: dict[str, Any], find: FindPrompt) -> OpenGroup:
        uid, given = packed["uid"], {name: value for name, value in packed.items() if name not in ("key", "index")}
        given["rollouts"] = [unpack_rollout(uid, one) for one in packed["rollouts"]]
        given["ahead"] = {index: one and unpack_rollout(uid, one) for index, one in packed["ahead"]}
        given["in_flight"], given["unsent"] = set(packed["in_flight"]), list(packed["unsent"])
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

    def __init__(self) -> None:
        self.in_flight = 0
        self.unsent = 0
        self._groups: dict[str, OpenGroup] = {}
        self._waiting: dict[str, None] = {}  # groups with unsent rollouts, in the order they wanted them
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
    def oldest(self) -> float:
        """The version of the group that was opened first; infinite if none is open."""
        return next((group.version for group in self), math.inf)

    @property
    def waiting(self) -> list[OpenGroup]:
        """The groups with unsent rollouts, in the order they wanted them."""
        return [self._groups[uid] for uid in self._waiting]

    @property
    def lost(self) -> int:
        """How many of the rollouts in flight the engine has lost and was not asked for again yet."""
        return sum(map(len, self._again.values()))

    def open(self, group: OpenGroup) -> None:
        self._groups[group.uid] = group
        self.want(group, group.planned)

    def want(self, group: OpenGroup, n: int) -> None:
        group.ask(n)
        self._waiting[group.uid] = None
        self.unsent += n

    def send(self, room: float) -> list[Request]:
        """Return requests for unsent rollouts, at most ``room`` of them, first wanted first."""
        sent: list[Request] = []
        while self._waiting and room > 0:
            group = self._groups[next(iter(self._waiting))]
            request = group.send(int(min(len(group.unsent), room)))
            if not group.unsent:
                del self._waiting[group.uid]
            room -= request.n
            self.unsent -= request.n
            self.in_flight += request.n
            sent.append(request)
        return sent

    def arrive(self, group: OpenGroup, event: Rollout | Failure) -> None:
        group.arrive(event)
        if event.index in self._again.get(group.uid, ()):
            self._again[group.uid].remove(event.index)
        self.in_flight -= 1

    def close(self, group: OpenGroup) -> None:
        """Remove a group and cancel its rollouts in flight."""
        del self._groups[group.uid]
        self._waiting.pop(group.uid, None)
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
            "waiting": list(self._waiting),
            "again": [[uid, list(indices)] for uid, indices in self._again.items()],
            "cancelled": list(self._cancelled),
        }

    def load_state_dict(self, state: dict[str, Any], find: FindPrompt) -> None:
        groups = [OpenGroup.unpack(packed, find) for packed in state["visits"]]
        self._groups = {group.uid: group for group in groups}
        self._waiting = dict.fromkeys(state["waiting"])
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
    """Hands out ``(index, n)``: a prompt that is not yet open, and how many rollouts to ask for at first.

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
        self._waiting: deque[tuple[int, int]] = deque()

    def head(self) -> tuple[int, int] | None:
        """Return the next prompt without removing it; None when there are no more."""
        if not self._waiting:
            self._choose()
        return self._waiting[0] if self._waiting else None

    @property
    def indices(self) -> list[int]:
        return [index for index, _ in self._waiting]

    def pop(self) -> tuple[int, int]:
        return self._waiting.popleft()

    def put_back(self, index: int, n: int) -> None:
        """Visit a prompt next, because its visit was cancelled."""
        self._waiting.appendleft((index, n))

    def _choose(self) -> None:
        rows = self._selector.choose(self._order, self._beliefs, self._batch, self._rng)
        sizes = self._allocator.first(rows, self._beliefs)
        if len(sizes) != len(rows) or any(n < 1 for n in sizes):
            name = type(self._allocator).__name__
            raise ValueError(f"{name}.first gave {list(sizes)} for {len(rows)} prompts; accepted: 1 or more for each")
        chosen = [int(row) for row in rows]
        self._order.claim(chosen)
        self._waiting.extend(zip(chosen, sizes, strict=True))

    def state_dict(self) -> dict[str, Any]:
        keys = self._beliefs.keys
        waiting = [(index, n, int(keys[index])) for index, n in self._waiting]
        return {"rng": self._rng.bit_generator.state, "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Prompts that are gone from the data are dropped."""
        self._rng.bit_generator.state = state["rng"]
        positions = KeyedPositions(self._beliefs.keys)
        found = ((positions.find_one(key, index), n) for index, n, key in state["waiting"])
        self._waiting = deque((index, n) for index, n in found if index >= 0)
