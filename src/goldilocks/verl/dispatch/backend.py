"""verl's agent loops as a backend: requests go to the workers, and what becomes of each rollout comes back.

Tensors stay in the TransferQueue; the payload of a rollout is the keys and tags of its rows. The seeds and the event of
a rollout are here for the workers, which import no driver.

The seed of a rollout's noise is a function of the run's seed, the prompt, the visit and the index. Two runs with one
seed draw the same noise for the same rollout, whatever else is generated, in any order, at any server.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from goldilocks.drive.backend import Backend, Unpaused
from goldilocks.errors import require
from goldilocks.rewards import is_number
from goldilocks.types import Event, Failure, Paused, Request, Rollout, hashed, row_key
from goldilocks.verl.dispatch.failures import published_error
from goldilocks.verl.store import PLACEHOLDER, VERSIONS, QueueRows, SavedAnswer, Versions, oldest_and_newest

if TYPE_CHECKING:
    from goldilocks.verl.dispatch.client import Session
    from goldilocks.verl.dispatch.worker import StreamingManager

# The fields that the backend adds to a prompt's row for the worker.
ROLLOUTS = "__rollout_n__"  # how many sessions to run: verl's own name
FIRST = "__rollout_first__"  # the index of the first of them
VISIT_SEED = "__visit_seed__"  # the seed of the noise of all of them
ANSWERS = "__answers__"  # by index, the saved answers of unfinished rollouts


class AgentLoops(Backend):
    """The backend over a ``StreamingManager``, which ``fit`` sets."""

    manager: StreamingManager
    room = None  # the workers take any number of rollouts
    global_steps = 0  # verl's number of the step that asks

    def __init__(self, config: Any, dataset: Any, refilling: Callable[[], AbstractContextManager[None]]) -> None:
        """``refilling`` wakes the rollout servers that sleep while the trainer has the batch."""
        taken = [name for name in (ROLLOUTS, "__do_sample__") if name in dataset[0]]  # verl obeys both
        accepted = "other names; goldilocks.allocator decides how often a prompt is answered, never greedily"
        require(not taken, "columns of data.train_files", taken, accepted)
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
        return self._noted(self.manager.so_far(with_answers=False)[0] if within == 0 else self.manager.events(within))

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


# -- the noise ---------------------------------------------------------------------------------------------------------

RunSeeds = tuple[object, object]  # of the data and of the rollouts

VALIDATION = -1  # the visit of every validation, so that all draw the same noise

# The name of the seed in each engine's sampling parameters. Engines other than ours sample more slowly with a seed in
# each request, so they get one only with `rollout.full_determinism`.
SEED_OF = {"transformers": "seed", "vllm": "seed", "sglang": "sampling_seed"}
ALWAYS_SEEDED = ("transformers",)


def run_seeds(config: Any) -> RunSeeds:
    """The seeds in verl's config. Read them once: OmegaConf takes longer to read a key than a seed takes to compute."""
    return config.data.get("seed"), config.actor_rollout_ref.rollout.seed


def visit_seed(seeds: RunSeeds, key: int, place: object, visit: int) -> int:
    """The seed of one visit to a prompt; ``place`` is its place in the data, so that copies get different answers."""
    return hashed(*seeds, key, place, visit)


def seeded(sampling_params: Mapping[str, Any], rollout_config: Any, visit: int, index: int) -> dict[str, Any]:
    """The sampling parameters of rollout ``index`` of the visit whose seed is ``visit``."""
    name = SEED_OF.get(rollout_config.name)
    if name is None or not (rollout_config.name in ALWAYS_SEEDED or rollout_config.full_determinism):
        return dict(sampling_params)
    return {**sampling_params, name: hashed(visit, index)}


def request_number(row: Mapping[str, Any]) -> int:
    """A number for each rollout. With ``full_determinism`` verl names a request by its priority, 0 for all of them."""
    return hashed(row["uid"], row["session_id"])


# -- the event that a rollout ends with --------------------------------------------------------------------------------


def rollout_of(session: Session, outputs: list[Any], global_steps: int, truncated: bool, versions: Versions) -> Rollout:
    """The event of a session whose rows are stored; each of ``outputs``, of verl's agent loop, is a row."""
    final, uid, index = outputs[-1], session.uid, session.index
    counts = [sum(one.response_mask) for one in outputs]
    by_row = _by_row(versions, counts)
    tags = []
    for place, one in enumerate(outputs):
        own = versions if by_row is None else by_row[place]
        prompt_len, response_len = len(one.prompt_ids), len(one.response_ids)
        tag: dict[str, Any] = {  # as verl's worker tags a trajectory
            "status": "success",
            "prompt_len": prompt_len,
            "response_len": response_len,
            "seq_len": prompt_len + response_len,
            "global_steps": global_steps,
            **oldest_and_newest(own),
        }
        if by_row is not None and tag["min_global_steps"] != tag["max_global_steps"]:
            tag[VERSIONS] = own
        tags.append(tag)
    version = min((tag["min_global_steps"] for tag in tags if tag["min_global_steps"] is not None), default=None)
    info = final.extra_fields.get("reward_extra_info") or {}
    return Rollout(
        uid,
        index,
        reward=float(final.reward_score),
        tokens=max(session.tokens, sum(counts)),  # rows may lack tokens that were generated
        metrics={name: float(value) for name, value in info.items() if is_number(value)},
        truncated=truncated,
        version=None if version is None else int(version),
        payload=[[row_key(uid, index, part), tag] for part, tag in enumerate(tags)],
        tool_tokens=sum(len(one.response_mask) for one in outputs) - sum(counts),
    )


def _by_row(versions: Versions, counts: list[int]) -> list[Versions] | None:
    """Divide the tokens that policies wrote among rows with so many tokens each; None where their numbers differ."""
    if len(counts) == 1:
        return [versions]  # a row that was cut has the first of the tokens
    if sum(counts) != sum(count for _, count in versions):
        return None
    tokens = iter([version for version, count in versions for _ in range(count)])
    rows = (itertools.groupby(itertools.islice(tokens, count)) for count in counts)
    return [[[version, len(list(written))] for version, written in row] for row in rows]
