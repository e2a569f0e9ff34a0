"""verl's agent loops as a backend: requests go to the workers, and what happens to each rollout comes back at once.

Tensors stay in the TransferQueue; the payload of a rollout is the keys and tags of its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from goldilocks.drive.backend import Backend
from goldilocks.types import Failure, Paused, Request, Rollout
from goldilocks.verl.dispatch.failures import published_error
from goldilocks.verl.dispatch.sampling_seed import RunSeeds, run_seeds, visit_seed
from goldilocks.verl.store.rows import (
    ANSWERS,
    FIRST,
    PLACEHOLDER,
    ROLLOUTS,
    VISIT_SEED,
    QueueRows,
    SavedAnswer,
    Unfinished,
)

if TYPE_CHECKING:
    from goldilocks.verl.dispatch.manager import StreamingManager
    from goldilocks.verl.dispatch.worker import Report

Refilling = Callable[[], AbstractContextManager[None]]


class AgentLoops(Backend):
    """The workers of a ``StreamingManager``, which ``fit`` brings."""

    manager: StreamingManager
    global_steps = 0  # verl's number of the step that asks

    def __init__(self, config: Any, dataset: Any, refilling: Refilling) -> None:
        """``refilling`` wakes the rollout servers that sleep while the trainer has the batch."""
        self._config = config
        self._dataset = dataset
        self._refilling = refilling
        self._succeeded_at = 0.0
        self.check_several_rows: Callable[[], object] = lambda: None  # raises where such rollouts cannot be trained
        self.rows = QueueRows(Unfinished(self.unfinished))

    def submit(self, requests: Sequence[Request]) -> None:
        if requests:
            self.manager.start([self._prompt(request) for request in requests])

    def events(self, within: float | None = None) -> Iterator[Rollout | Failure]:
        return self._noted(self.manager.events(within))

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
        return f"the first said: {published_error(self._succeeded_at)}"

    def unfinished(self) -> list[SavedAnswer]:
        """Return the answers that unfinished rollouts can go on from."""
        return self.manager.answers()

    def _noted(self, events: Iterable[Report]) -> Iterator[Rollout | Failure]:
        """Note for each event, as the driver takes it in, which rows are in the queue and when the last one came."""
        for event in events:
            if isinstance(event, Rollout):
                self._succeeded_at = time.time()
                if len(event.payload) > 1:
                    self.check_several_rows()
                self.rows.put((event.uid, event.index), event.payload)
            yield event

    def _prompt(self, request: Request) -> dict[str, Any]:
        """The row of the dataset, with what the agent loops need to know of the request."""
        row = self._dataset[request.prompt.index]
        return {
            # Ray takes longer to send the placeholder, a tensor, than all the rest.
            **{name: value for name, value in row.items() if name != PLACEHOLDER},
            "uid": request.uid,
            ROLLOUTS: request.n,
            FIRST: request.first,
            VISIT_SEED: self._visit_seed(request),
            ANSWERS: self.rows.unfinished.give(request),
            "global_steps": self.global_steps,
        }

    @cached_property
    def _seeds(self) -> RunSeeds:
        return run_seeds(self._config)

    def _visit_seed(self, request: Request) -> int:
        """Seed by the number of the visit to the prompt: the same whatever is generated beside it."""
        return visit_seed(self._seeds, request.prompt.key, request.prompt.index, request.visit)


class NeverPausing(AgentLoops):
    """For servers with devices of their own, which generate while the trainer trains.

    verl stops what is being written when it has new weights, and lets it go on.
    """

    _answers: list[SavedAnswer] | None = None

    def pause(self) -> Iterable[Paused]:
        return ()

    def drain(self) -> None:
        """Do nothing: nothing stops."""

    def so_far(self) -> Iterator[Rollout | Failure]:
        """Return everything that has happened up to now."""
        events, _ = self.manager.so_far(with_answers=False)
        return self._noted(events)

    def up_to_saved_moment(self) -> Iterator[Rollout | Failure]:
        """Return everything that has happened up to one moment, of which the answers are saved too."""
        events, self._answers = self.manager.so_far(with_answers=True)
        return self._noted(events)

    def unfinished(self) -> list[SavedAnswer]:
        """Of the moment that was observed last: a rollout that has ended since then is unfinished to the collector."""
        answers, self._answers = self._answers, None
        return super().unfinished() if answers is None else answers
