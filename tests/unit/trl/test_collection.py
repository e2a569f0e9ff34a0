"""A batch of several processes, each a thread here: the first decides, and all of them end together."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import plain_collector

from goldilocks.core import Exhausted, Limits
from goldilocks.drive.backend import Rounds
from goldilocks.drive.driver import MAX_FAILURES, Driver
from goldilocks.rewards.calls import RewardCosts
from goldilocks.trl.collection import Collection, Processes, Rewards, Sizes
from goldilocks.trl.on_disk import Saved
from goldilocks.trl.rows import CompletionRow, CompletionRows

SECONDS = 60  # a process that waits this long waits for ever
REWARDS = Rewards(["right"], lambda row: row.reward([1.0]), lambda groups: [torch.zeros(len(one)) for one in groups])


class Wire:
    """Two processes' ends of accelerate's collectives."""

    def __init__(self) -> None:
        self.rank = threading.local()
        self._sent: Queue[bytes] = Queue()
        self._parts: dict[int, list[Any]] = {}
        self._all = threading.Barrier(2, timeout=SECONDS)
        self._costs = (RewardCosts(), RewardCosts())

    def broadcast(self, box: list[Any]) -> None:
        if self.rank.value == 0:
            self._sent.put(pickle.dumps(box[0]))
        else:
            box[0] = pickle.loads(self._sent.get(timeout=SECONDS))

    def gather(self, items: list[Any]) -> list[Any]:
        self._parts[self.rank.value] = items
        self._all.wait()
        found = [*self._parts[0], *self._parts[1]]
        self._all.wait()
        return found

    def add(self, **counts: float) -> None:
        """Count what a reward function of this process costs, in the place of ``goldilocks.rewards.spent``."""
        self._costs[self.rank.value].add(**counts)

    def clear(self) -> None:
        self.read()

    def read(self) -> dict[str, float]:
        return self._costs[self.rank.value].read()


def process(rank: int) -> Processes:
    return Processes(SimpleNamespace(num_processes=2, process_index=rank))


def collection(wire: Wire, own: Processes, limits: Limits) -> Collection:
    """Return the collection of this process, which is this thread from now on."""
    wire.rank.value = own.rank
    rows, prompts = CompletionRows(), SimpleNamespace(rows=lambda indices: [{"index": one} for one in indices])
    sizes = Sizes(n=2, parts=1, pad_token=0, multiple=None)
    made = Collection(prompts, rows, own, sizes, keeps=False, seed=1)  # type: ignore[arg-type]
    if own.first:
        made.driver = Driver(plain_collector(limits=limits), Rounds(made.events), rows)
    return made


def collected(wire: Wire, rank: int, tokens: int, limits: Limits) -> Any:
    """Return this process's batch, or what ended it; every answer has so many tokens."""
    subject = collection(wire, process(rank), limits)

    def generate(inputs: list[dict[str, Any]], *_: Any) -> tuple[dict[str, Any], list[CompletionRow]]:
        wire.add(calls=len(inputs), seconds=1.5 + rank)
        ids = torch.ones(tokens, dtype=torch.long)
        tensors = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), ids)
        return {}, [CompletionRow(tensors, (float(place % 2),), "", "") for place in range(len(inputs))]

    try:
        subject.collect(generate, lambda rows: [], REWARDS)
    except Exception as error:
        return error
    return subject.batch


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    made = Wire()
    monkeypatch.setattr("goldilocks.trl.collection.broadcast_object_list", made.broadcast)
    monkeypatch.setattr("goldilocks.trl.collection.gather_object", made.gather)
    for module in ("trl.collection", "drive.backend"):
        monkeypatch.setattr(f"goldilocks.{module}.spent", made)
    return made


def test_an_error_after_a_round_that_was_interrupted_ends_the_others_too(wire: Wire) -> None:
    """An exception in a round is every process's own; the next one may be the first's alone."""

    def run(rank: int) -> Any:
        subject = collection(wire, process(rank), Limits())

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        def failing(**_: Any) -> Any:
            raise Exhausted("no more")

        with pytest.raises(KeyboardInterrupt):
            subject.collect(interrupted, lambda rows: [], REWARDS)
        if subject.driver is not None:
            subject.driver.batch = failing  # type: ignore[method-assign]
        with pytest.raises(Exhausted):
            subject.collect(interrupted, lambda rows: [], REWARDS)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))


def both(wire: Wire, tokens: int, limits: Limits) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: collected(wire, rank, tokens, limits), range(2)))


def test_all_processes_have_the_batch_that_the_first_decided_and_what_its_rewards_cost_on_all(wire: Wire) -> None:
    first, second = both(wire, 3, Limits())
    assert [group.uid for group in first.groups] == [group.uid for group in second.groups] == ["g0", "g1"]
    assert first.metrics["accounts/reward_calls"] == first.metrics["accounts/generated_rollouts"] == 4
    assert first.metrics["accounts/reward_seconds"] == 1.5 + 2.5


def test_what_a_validation_costs_on_every_process_is_in_the_checkpoint(wire: Wire, tmp_path: Path) -> None:
    def saved(rank: int) -> None:
        own = process(rank)
        subject = collection(wire, own, Limits())
        wire.add(calls=1 + rank)
        Saved(subject, own).write(tmp_path, 1, None)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(saved, range(2)))
    again = Driver(plain_collector(), Rounds(lambda _: ()), CompletionRows())
    again.load(tmp_path)
    assert again.metrics()["accounts/reward_calls"] == 1 + 2


def test_what_ends_the_first_process_ends_the_others(wire: Wire) -> None:
    for limits, kind, text in (
        (Limits(max_num_gen_batches=1), Exhausted, "every rollout of the step failed (12 × empty_response)"),
        (Limits(), RuntimeError, f"{MAX_FAILURES} rollouts failed in a row; the last one: empty_response"),
    ):
        first, second = both(wire, 0, limits)
        assert type(first) is type(second) is kind
        assert text in str(first) == str(second)
