"""The groups that wait for rollouts: what they want, what is in flight for them, and what is no longer needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from goldilocks.core.packing import pack_visit, unpack_visit
from goldilocks.core.visit import Visit
from goldilocks.types import Failure, Prompt, Request, Rollout


class OpenGroups:
    """Visits by uid, in the order they were opened, with running counts: nothing here scans all of them."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.unsent = 0
        self._visits: dict[str, Visit] = {}
        self._waiting: dict[str, None] = {}  # groups with unsent rollouts, in the order they wanted them
        self._again: dict[str, list[int]] = {}  # of each group, what is in flight and was lost by the engine
        self._cancelled: list[str] = []

    def __len__(self) -> int:
        return len(self._visits)

    def __iter__(self) -> Iterator[Visit]:
        return iter(self._visits.values())

    def __contains__(self, uid: str) -> bool:
        return uid in self._visits

    def get(self, uid: str) -> Visit | None:
        """Return the open group of this name, or None."""
        return self._visits.get(uid)

    @property
    def oldest(self) -> float:
        """The version of the group that was opened first; infinite if none is open."""
        return next((visit.version for visit in self), math.inf)

    @property
    def waiting(self) -> list[Visit]:
        """The groups with unsent rollouts, in the order they wanted them."""
        return [self._visits[uid] for uid in self._waiting]

    @property
    def lost(self) -> int:
        """How many of the rollouts in flight the engine has lost and was not asked for again yet."""
        return sum(map(len, self._again.values()))

    def open(self, visit: Visit) -> None:
        """Add a group, with a first ask of as many rollouts as were planned."""
        self._visits[visit.uid] = visit
        self.want(visit, visit.planned)

    def want(self, visit: Visit, n: int) -> None:
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

    def arrive(self, visit: Visit, event: Rollout | Failure) -> None:
        """Take in what became of a rollout in flight."""
        visit.arrive(event)
        if event.index in self._again.get(visit.uid, ()):
            self._again[visit.uid].remove(event.index)
        self.in_flight -= 1

    def close(self, visit: Visit) -> None:
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
            "visits": [pack_visit(visit) for visit in self],
            "waiting": list(self._waiting),
            "again": [[uid, list(indices)] for uid, indices in self._again.items()],
            "cancelled": list(self._cancelled),
        }

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[dict[str, Any]], Prompt]) -> None:
        """``prompt`` finds the prompt that a packed visit is about."""
        visits = [unpack_visit(packed, prompt(packed)) for packed in state["visits"]]
        self._visits = {visit.uid: visit for visit in visits}
        self._waiting = dict.fromkeys(state["waiting"])
        self._again = {uid: list(indices) for uid, indices in state.get("again", ())}
        self._cancelled = list(state["cancelled"])
        self.in_flight = sum(len(visit.in_flight) for visit in visits)
        self.unsent = sum(len(visit.unsent) for visit in visits)
