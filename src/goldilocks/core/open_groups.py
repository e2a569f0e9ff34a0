"""One open group: which rollouts it has, which are at the engine, and which are still to be sent.

Every rollout has an index, given when it is asked for. Rollouts count in the order of their indices, not in which they
arrive: ``rollouts`` is the prefix of indices that have all arrived, and only the prefix is shown to policies. Otherwise
short answers, which arrive first, would decide when a group stops.

An index is in exactly one of four places: settled (below ``settled``), ``ahead`` (arrived, with a gap before it),
``in_flight`` (at the engine) or ``unsent``.

The groups that wait for rollouts: what they want, what is in flight for them, and what is no longer needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from goldilocks.core.packing import pack_rollout, unpack_rollout
from goldilocks.types import Failure, Group, Prompt, Request, Rollout


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
        """How many indices are not settled yet."""
        return len(self.ahead) + len(self.in_flight) + len(self.unsent)

    @property
    def arrived(self) -> list[Rollout]:
        """Every rollout that arrived, in the prefix or ahead of it."""
        return [*self.rollouts, *(rollout for rollout in self.ahead.values() if rollout is not None)]

    def ask(self, n: int) -> None:
        """Want ``n`` more rollouts."""
        self.unsent += range(self.asked, self.asked + n)
        self.asks += 1

    def send(self, most: int) -> Request:
        """Return a request for the first unsent indices: as many as are consecutive, at most ``most``."""
        request = self._request(self.unsent, most)
        self.in_flight.update(self.unsent[: request.n])
        del self.unsent[: request.n]
        return request

    def send_again(self, indices: list[int], most: int) -> Request:
        """Return a request for the first of these indices, which are in flight, and remove them from the list."""
        request = self._request(indices, most)
        del indices[: request.n]
        return request

    def _request(self, indices: list[int], most: int) -> Request:
        first, n = indices[0], 1
        while n < min(most, len(indices)) and indices[n] == first + n:
            n += 1
        return Request(self.uid, self.prompt, n, first, self.number)

    def arrive(self, event: Rollout | Failure) -> None:
        """Take in the outcome of an index that is in flight."""
        self.in_flight.remove(event.index)
        self.ahead[event.index] = event if isinstance(event, Rollout) else None

    def settle(self) -> bool:
        """Move the next index into the prefix, or count it as failed. False if it has not arrived."""
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


def group_name(number: int) -> str:
    """Return the name of the group whose prompt was the ``number``-th to be issued."""
    return f"g{number}"


def issue_order(uid: str) -> int:
    """Return the number that ``group_name`` was given: the order in which prompts were issued."""
    return int(uid[1:])


def was_issued(uid: str, prompts_issued: int) -> bool:
    """Whether ``uid`` names one of the first ``prompts_issued`` groups."""
    return uid[:1] == "g" and uid[1:].isdecimal() and issue_order(uid) < prompts_issued


def pack_open_group(visit: OpenGroup) -> dict[str, Any]:
    """An open group, whole."""
    return {
        "uid": visit.uid,
        "key": visit.prompt.key,
        "index": visit.prompt.index,
        "planned": visit.planned,
        "version": visit.version,
        "number": visit.number,
        "rollouts": [pack_rollout(rollout) for rollout in visit.rollouts],
        "settled": visit.settled,
        "ahead": [[index, None if one is None else pack_rollout(one)] for index, one in visit.ahead.items()],
        "in_flight": sorted(visit.in_flight),
        "unsent": list(visit.unsent),
        "asks": visit.asks,
        "failures": visit.failures,
    }


def unpack_open_group(packed: dict[str, Any], prompt: Prompt) -> OpenGroup:
    """The visit, to a prompt that may stand elsewhere now."""
    uid = packed["uid"]
    return OpenGroup(
        uid,
        prompt,
        packed["planned"],
        packed["version"],
        number=packed.get("number", 0),
        rollouts=[unpack_rollout(uid, one) for one in packed["rollouts"]],
        settled=packed["settled"],
        ahead={index: None if one is None else unpack_rollout(uid, one) for index, one in packed["ahead"]},
        in_flight=set(packed["in_flight"]),
        unsent=list(packed["unsent"]),
        asks=packed["asks"],
        failures=packed["failures"],
    )


class OpenGroups:
    """Visits by uid, in the order they were opened, with running counts: nothing here scans all of them."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.unsent = 0
        self._visits: dict[str, OpenGroup] = {}
        self._waiting: dict[str, None] = {}  # groups with unsent rollouts, in the order they wanted them
        self._again: dict[str, list[int]] = {}  # of each group, what is in flight and was lost by the engine
        self._cancelled: list[str] = []

    def __len__(self) -> int:
        return len(self._visits)

    def __iter__(self) -> Iterator[OpenGroup]:
        return iter(self._visits.values())

    def __contains__(self, uid: str) -> bool:
        return uid in self._visits

    def get(self, uid: str) -> OpenGroup | None:
        """Return the open group of this name, or None."""
        return self._visits.get(uid)

    @property
    def oldest(self) -> float:
        """The version of the group that was opened first; infinite if none is open."""
        return next((visit.version for visit in self), math.inf)

    @property
    def waiting(self) -> list[OpenGroup]:
        """The groups with unsent rollouts, in the order they wanted them."""
        return [self._visits[uid] for uid in self._waiting]

    @property
    def lost(self) -> int:
        """How many of the rollouts in flight the engine has lost and was not asked for again yet."""
        return sum(map(len, self._again.values()))

    def open(self, visit: OpenGroup) -> None:
        """Add a group, with a first ask of as many rollouts as were planned."""
        self._visits[visit.uid] = visit
        self.want(visit, visit.planned)

    def want(self, visit: OpenGroup, n: int) -> None:
        """Ask for ``n`` more rollouts of a group."""
        visit.ask(n)
        self._waiting[visit.uid] = None
        self.unsent += n

    def send(self, room: float) -> list[Request]:
        """Return requests for unsent rollouts, at most ``room`` of them, first wanted first."""
        sent: list[Request] = []
        while self._waiting and room > 0:
            visit = self._visits[next(iter(self._waiting))]
            request = visit.send(int(min(len(visit.unsent), room)))
            if not visit.unsent:
                del self._waiting[visit.uid]
            room -= request.n
            self.unsent -= request.n
            self.in_flight += request.n
            sent.append(request)
        return sent

    def arrive(self, visit: OpenGroup, event: Rollout | Failure) -> None:
        """Take in what became of a rollout in flight."""
        visit.arrive(event)
        if event.index in self._again.get(visit.uid, ()):
            self._again[visit.uid].remove(event.index)
        self.in_flight -= 1

    def close(self, visit: OpenGroup) -> None:
        """Remove a group. What it has in flight is cancelled."""
        del self._visits[visit.uid]
        self._waiting.pop(visit.uid, None)
        self._again.pop(visit.uid, None)
        self.unsent -= len(visit.unsent)
        self.in_flight -= len(visit.in_flight)
        if visit.in_flight:
            self._cancelled.append(visit.uid)

    def cancelled(self) -> list[str]:
        """Return the groups closed with rollouts in flight since this was last asked."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def lose(self) -> None:
        """Note that the engine has lost everything in flight. To the groups it stays in flight: it was asked for."""
        self._again = {visit.uid: sorted(visit.in_flight) for visit in self if visit.in_flight}

    def send_again(self, room: float) -> list[Request]:
        """Return requests for rollouts that the engine has lost, at most ``room`` of them."""
        sent: list[Request] = []
        while self._again and room > 0:
            uid, indices = next(iter(self._again.items()))
            if indices:
                sent.append(self._visits[uid].send_again(indices, int(min(len(indices), room))))
                room -= sent[-1].n
            if not indices:
                del self._again[uid]
        return sent

    def state_dict(self) -> dict[str, Any]:
        return {
            "visits": [pack_open_group(visit) for visit in self],
            "waiting": list(self._waiting),
            "again": [[uid, list(indices)] for uid, indices in self._again.items()],
            "cancelled": list(self._cancelled),
        }

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[dict[str, Any]], Prompt]) -> None:
        """``prompt`` finds the prompt that a packed visit is about."""
        visits = [unpack_open_group(packed, prompt(packed)) for packed in state["visits"]]
        self._visits = {visit.uid: visit for visit in visits}
        self._waiting = dict.fromkeys(state["waiting"])
        self._again = {uid: list(indices) for uid, indices in state.get("again", ())}
        self._cancelled = list(state["cancelled"])
        self.in_flight = sum(len(visit.in_flight) for visit in visits)
        self.unsent = sum(len(visit.unsent) for visit in visits)
