"""One open group: which rollouts it has, which are at the engine, and which are still to be sent.

Every rollout has an index, given when it is asked for. Rollouts count in the order of their indices, not in which they
arrive: ``rollouts`` is the prefix of indices that have all arrived, and only the prefix is shown to policies. Otherwise
short answers, which arrive first, would decide when a group stops.

An index is in exactly one of four places: settled (below ``settled``), ``ahead`` (arrived, with a gap before it),
``in_flight`` (at the engine) or ``unsent``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from goldilocks.types import Failure, Group, Prompt, Request, Rollout


@dataclass(slots=True)
class Visit:
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
