"""An open group as the collector sees it: what has arrived, what is in flight, what is still to be asked for.

Every rollout of the group is in exactly one of three places: ``rollouts`` (arrived), ``in_flight`` (at the engine),
``unsent`` (wanted, not yet sent). Indices are never used twice, so a rollout that comes late is recognised.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from goldilocks.types import Group, Prompt, Request, Rollout


@dataclass(slots=True)
class Visit:
    """One visit to one prompt, from the first request to the verdict."""

    uid: str
    prompt: Prompt
    planned: int
    version: int
    unsent: int = 0
    next_index: int = 0
    asks: int = 0
    failures: int = 0
    rollouts: list[Rollout] = field(default_factory=list)
    in_flight: set[int] = field(default_factory=set)
    _view: Group | None = field(default=None, repr=False)

    @property
    def asked(self) -> int:
        """Rollouts that arrived or are still expected."""
        return len(self.rollouts) + len(self.in_flight) + self.unsent

    @property
    def waiting(self) -> bool:
        return bool(self.in_flight or self.unsent)

    def ask(self, n: int) -> None:
        """Want ``n`` more."""
        self.unsent += n
        self.asks += 1

    def send(self, n: int) -> Request:
        """``n`` of the unsent go to the engine."""
        request = Request(self.uid, self.prompt, n, self.next_index)
        self.in_flight.update(range(self.next_index, self.next_index + n))
        self.next_index += n
        self.unsent -= n
        return request

    def arrive(self, rollout: Rollout) -> None:
        self.rollouts.append(rollout)
        if rollout.version is not None and rollout.version < self.version:
            self.version = rollout.version
            self._view = None

    def view(self) -> Group:
        """The group as policies see it while it is open: made once, since its list of rollouts grows under it."""
        if self._view is None:
            self._view = Group(self.uid, self.prompt, self.rollouts, self.planned, self.version)
        return self._view

    def close(self) -> Group:
        """The finished group, in the order the rollouts were asked for, not in which they came."""
        rollouts = tuple(sorted(self.rollouts, key=lambda rollout: rollout.index))
        return Group(self.uid, self.prompt, rollouts, self.planned, self.version)
