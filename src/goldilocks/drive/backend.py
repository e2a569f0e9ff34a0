"""What generates: a backend is asked for rollouts and says what became of each.

verl's V0 trainer and TRL generate in rounds: a list of requests in one call, whose rollouts come back together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from goldilocks.core.accounts import in_words
from goldilocks.rewards import spent
from goldilocks.types import Event, Failure, Paused, Request

CANCELLED = "cancelled"  # the reason of a rollout that ended because it was cancelled
Generate = Callable[[Sequence[Request]], Iterable[Event]]


class Backend(ABC):
    """Generates what the collector asks for.

    Every rollout that was submitted is told of once, as a ``Rollout`` or as a ``Failure``; of a cancelled one a
    backend may say nothing. ``docs/adding-a-trainer.md`` has two; ``goldilocks.testing.check_backend`` checks yours.
    """

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Begin to generate these; none is an accepted number of them."""

    @abstractmethod
    def events(self, within: float | None = None) -> Iterable[Event]:
        """Return what has happened since the last call. Wait for something, or for ``within`` seconds.

        No event although the wait has no limit means that nothing is being generated. The driver takes in each event
        before it asks for the next, so this may be a generator.
        """

    @abstractmethod
    def cancel(self, uids: Sequence[str]) -> None:
        """Stop what these groups have in flight: it is no longer needed."""

    @abstractmethod
    def pause(self) -> Iterable[Paused]:
        """Stop all generation; return what each unfinished rollout has written (``on_full: partial``)."""

    @abstractmethod
    def resume(self) -> None:
        """Go on with what was paused."""

    @abstractmethod
    def drain(self) -> None:
        """Return when nothing is being generated, cancelled rollouts included: the trainer needs the device."""

    def up_to_saved_moment(self) -> Iterable[Event]:
        """Return what has happened up to this moment; what is saved next of unfinished rollouts is of the same moment.

        Where rollouts pause, one whose answer was complete may end while the trainer has the batch.
        """
        return ()

    @property
    def room(self) -> int | None:
        """How many more rollouts the backend takes now; None: any number."""
        return None

    def refilling(self) -> AbstractContextManager[None]:
        """Return a context for generation after the trainer has begun with the batch, to wake what sleeps by then."""
        return nullcontext()

    def rewards_spent(self) -> Mapping[str, float]:
        """Return what reward functions have cost since the last call; by default, those called in this process."""
        return spent.read()

    def explain(self, failure: Failure) -> str:
        """Return what a user should know when rollouts fail one after the other; ``failure`` is the last."""
        return f"the last one: {in_words(failure.reason)}"

    def state_dict(self) -> dict[str, Any]:
        """Return what a run that goes on needs of the backend, as JSON values and arrays."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where ``state_dict`` was written."""
        assert not state, f"{type(self).__name__} has no state"


class Unpaused(Backend):
    """A backend that never pauses: nothing of it has to stop before an update."""

    def pause(self) -> Iterable[Paused]:
        return ()

    def resume(self) -> None:
        """Do nothing: nothing pauses."""

    def drain(self) -> None:
        """Do nothing: nothing has to stop."""


class Rounds(Unpaused):
    """The backend of a trainer that generates a list of requests in one call."""

    def __init__(self, generate: Generate, room: int | None = None) -> None:
        """``generate`` returns an event for each rollout, in the order of the requests; ``room`` bounds a round."""
        self._generate = generate
        self._room = room
        self._requests: list[Request] = []

    @property
    def room(self) -> int | None:
        return self._room

    def submit(self, requests: Sequence[Request]) -> None:
        self._requests += requests

    def events(self, within: float | None = None) -> Iterator[Event]:
        requests, self._requests = self._requests, []
        if requests:
            yield from self._generate(requests)

    def cancel(self, uids: Sequence[str]) -> None:
        """Do nothing: a round has ended when the collector judges it."""


def places(requests: Sequence[Request]) -> Iterator[tuple[Request, int, int]]:
    """Yield for each rollout of a round its request, its number in the group, and where its prompt stands."""
    for place, request in enumerate(requests):
        for number in range(request.first, request.first + request.n):
            yield request, number, place
