"""verl's agent loops as a backend: requests go to the workers, and what becomes of each rollout comes back.

Tensors stay in the TransferQueue; the payload of a rollout is the keys and tags of its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from goldilocks.drive.backend import Backend, Unpaused
from goldilocks.types import Event, Failure, Paused, Request, Rollout
from goldilocks.verl.dispatch.failures import published_error
from goldilocks.verl.dispatch.session import ANSWERS, FIRST, ROLLOUTS, VISIT_SEED, run_seeds, visit_seed
from goldilocks.verl.store import PLACEHOLDER, QueueRows, SavedAnswer

if TYPE_CHECKING:
    from goldilocks.verl.dispatch.worker import StreamingManager


class AgentLoops(Backend):
    """The backend over a ``StreamingManager``, which ``fit`` sets."""

    manager: StreamingManager
    global_steps = 0  # verl's number of the step that asks

    def __init__(self, config: Any, dataset: Any, refilling: Callable[[], AbstractContextManager[None]]) -> None:
        """``refilling`` wakes the rollout servers that sleep while the trainer has the batch."""
        self._seeds = run_seeds(config)
        self._dataset = dataset
        self._refilling = refilling
        self._succeeded_at = 0.0
        self._answers: list[SavedAnswer] = []  # of unfinished rollouts, for the save that is being made
        self.check_several_rows: Callable[[], object] = lambda: None  # raises where such rollouts cannot be trained
        self.rows = QueueRows(self.unfinished)

    def submit(self, requests: Sequence[Request]) -> None:
        """Send the workers the rows of the data set, with what they need to know of each request."""
        prompts = []
        for request in requests:
            row = self._dataset[request.prompt.index]
            prompts.append(
                {
                    # Ray takes longer to send the placeholder, a tensor, than all the rest.
                    **{name: value for name, value in row.items() if name != PLACEHOLDER},
                    "uid": request.uid,
                    ROLLOUTS: request.n,
                    FIRST: request.first,
                    VISIT_SEED: visit_seed(self._seeds, request.prompt.key, request.prompt.index, request.visit),
                    ANSWERS: self.rows.give(request),
                    "global_steps": self.global_steps,
                }
            )
        if prompts:
            self.manager.start(prompts)

    def events(self, within: float | None = None) -> Iterator[Event]:
        """Without a wait every worker is asked, so that nothing that has happened is missing."""
        now = within == 0
        return self._noted(self.manager.so_far(with_answers=False)[0] if now else self.manager.events(within))

    def _noted(self, events: Iterable[Event]) -> Iterator[Event]:
        """Note of each rollout, as the driver takes it in, which rows are in the queue and when it came."""
        for event in events:
            if isinstance(event, Rollout):
                self._succeeded_at = time.time()
                if len(event.payload) > 1:
                    self.check_several_rows()
                self.rows.put((event.uid, event.index), event.payload)
            yield event

    def cancel(self, uids: Sequence[str]) -> None:
        self.manager.cancel(list(uids))

    def pause(self) -> Iterable[Paused]:
        return self.manager.pause()

    def resume(self) -> None:
        self.manager.resume()

    def drain(self) -> None:
        self.manager.drain()

    def rewards_spent(self) -> Mapping[str, float]:
        return self.manager.rewards_spent()

    def refilling(self) -> AbstractContextManager[None]:
        return self._refilling()

    def explain(self, failure: Failure) -> str:
        said = published_error(self._succeeded_at)
        return super().explain(failure) if said is None else f"the first said: {said}"

    def up_to_saved_moment(self) -> Iterator[Event]:
        """Return everything that has happened up to one moment, and keep the answers of that moment for the save."""
        events, self._answers = self.manager.so_far(with_answers=True)
        return self._noted(events)

    def unfinished(self) -> list[SavedAnswer]:
        """The answers of the moment that was observed last: what has ended since, the collector has not been told."""
        answers, self._answers = self._answers, []
        return answers


class NeverPausing(Unpaused, AgentLoops):
    """For servers with devices of their own, which generate while the trainer trains.

    verl stops what is being written when it has new weights, and lets it go on.
    """
