"""Checks for a policy or a trainer of your own: does it keep the promises that the collector and the driver rely on?

    from goldilocks.testing import check_allocator

    def test_my_allocator():
        check_allocator(lambda: MyAllocator(n=4))

``check_selector``, ``check_allocator`` and ``check_filter`` are for policies (docs/adding-a-policy.md). Each takes a
function that makes a fresh policy, drives a real ``Collector`` over prompts of every difficulty, faults mixed in, and
raises ``AssertionError`` with what went wrong. They check: what is answered is in range; the same seed gives the same
decisions; a run that is cut, saved and loaded goes on the same; the state is JSON values and arrays.

``check_backend``, ``check_rows`` and ``check_gate`` are for the parts of a trainer (docs/adding-a-trainer.md).
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from goldilocks.core import Collector, Limits, ListSource, Source
from goldilocks.core.allocators import Allocator, Fixed
from goldilocks.core.filters import Everything, Filter
from goldilocks.core.selectors import Selector, Uniform
from goldilocks.drive.backend import CANCELLED, Backend, places
from goldilocks.drive.driver import Driver
from goldilocks.drive.gate import Gate
from goldilocks.drive.rows import NoRows, Place, RowStore
from goldilocks.runs.checkpoints import load_state, save_state
from goldilocks.types import Event, Failure, Group, OnExhausted, Paused, Prompt, Request, Rollout, Verdict

PROMPTS = 60
TARGET, STEPS = 8, 5


def check_selector(make: Callable[[], Selector]) -> None:
    """A selector of yours keeps its promises."""
    _check(lambda: _collector(selector=make()))


def check_allocator(make: Callable[[], Allocator]) -> None:
    """An allocator of yours keeps its promises."""
    _check(lambda: _collector(allocator=make()))


def check_filter(make: Callable[[], Filter]) -> None:
    """A filter of yours keeps its promises."""
    rollouts = tuple(Rollout("g0", index, reward=index % 2, tokens=3) for index in range(4))
    verdict = make().judge(Group("g0", Prompt(0, 0), rollouts))
    assert isinstance(verdict, Verdict), f"judge gave {verdict!r}: a Verdict is expected"
    assert verdict.keep or verdict.reason, "a group that is dropped needs a reason: it becomes a metric"
    _check(lambda: _collector(filter=make()))


def _collector(
    source: Source | None = None,
    selector: Selector | None = None,
    allocator: Allocator | None = None,
    filter: Filter | None = None,
) -> Collector:
    return Collector(
        source or ListSource([f"prompt {index}" for index in range(PROMPTS)]),
        selector or Uniform(),
        allocator or Fixed(4),
        filter or Everything(),
        target_groups=TARGET,
        limits=Limits(max_num_gen_batches=20, on_exhausted=OnExhausted.BACKFILL),
    )


def _check(make: Callable[[], Collector]) -> None:
    whole = _drive(make, cut=False)
    assert _drive(make, cut=False) == whole, "the same seed gave other decisions: draw only from the rng you are given"
    assert _drive(make, cut=True) == whole, "cut, saved and loaded, it decides otherwise: state_dict misses something"


def _drive(make: Callable[[], Collector], *, cut: bool) -> list[Any]:
    """Every decision of a short run; with ``cut``, the collector is saved and made anew at every turn."""
    collector, turn = make(), 0
    log: list[Any] = []
    pending: list[tuple[str, int, int]] = []
    for _ in range(STEPS):
        while not collector.ready:
            turn += 1
            if cut:
                state, collector = _on_disk(collector.state_dict()), make()
                collector.load_state_dict(state)
            for request in collector.requests(room=64 - len(pending)):
                log.append((request.uid, request.prompt.index, request.n))
                pending += [(request.uid, request.first + i, request.prompt.index) for i in range(request.n)]
            assert len(pending) <= 64, f"{len(pending)} rollouts in flight, 64 were allowed"
            random.Random(turn).shuffle(pending)
            for uid, index, prompt in pending[:16]:
                collector.observe(_outcome(uid, index, prompt))
                collector.accounts.check()
            pending = pending[16:]
            gone = collector.cancelled()
            log += gone
            pending = [item for item in pending if item[0] not in gone]
            assert turn < 5_000, "after 5,000 turns there is still no batch: does the group ever end?"
        log.append([group.uid for group in collector.take()])
        assert all(isinstance(value, (int, float)) for value in collector.metrics().values()), "metrics must be numbers"
        pending = [item for item in pending if item[0] not in collector.cancelled()]
    return log


def _outcome(uid: str, index: int, prompt: int) -> Rollout | Failure:
    rng = random.Random(f"{uid} {index}")
    if rng.random() < 0.05:
        return Failure(uid, index, "lost", tokens=rng.randint(0, 5))
    reward = float(rng.random() < prompt / (PROMPTS - 1))
    return Rollout(uid, index, reward, tokens=rng.randint(1, 30), metrics={"acc": reward}, truncated=rng.random() < 0.1)


# -- the parts of a trainer --------------------------------------------------------------------------------------------


def check_backend(make: Callable[[], Backend], source: Source | None = None, batches: int = 3) -> None:
    """A backend of yours tells of every rollout once, and of none that it was not asked for.

    It generates a few batches of eight groups. ``source`` are the prompts it can answer; by default they are texts.
    """
    watched, collector = _Watched(make()), _collector(source)
    driver = Driver(collector, watched, NoRows())
    for _ in range(batches):
        assert len(driver.batch()) == TARGET, "the batch is not full"
        collector.accounts.check()
        untold = watched.asked - watched.told
        missing = sorted(place for place in untold if place[0] not in watched.cancelled)
        assert not missing, f"nothing was told of {missing[:5]}: each rollout ends as a Rollout or as a Failure"
    state = watched.inner.state_dict()
    fresh = make()
    if state:
        fresh.load_state_dict(_on_disk(state))
    assert fresh.state_dict() == state, "state_dict and load_state_dict do not fit together"


def check_rows(make: Callable[[], RowStore[Any]], rows: Sequence[Any], same: Callable[[Any, Any], bool]) -> None:
    """A row store of yours returns the rows it was given, frees the others, and survives on disk.

    ``rows`` are examples of what it stores, at least two; ``same`` says whether two of them are the same row.
    """
    store, count = make(), len(rows)
    assert count >= 2, f"rows={count} examples: two or more are needed"
    kept, freed = [("g0", index) for index in range(count)], [("g1", index) for index in range(count)]
    for place, row in zip([*kept, *freed], [*rows, *rows], strict=True):
        store.put(place, row)
    backwards = store.get(kept[::-1])
    assert all(map(same, backwards, rows[::-1])), "get returns other rows than were put, or in another order"
    store.retain({"g0"})
    try:
        store.get(freed[:1])
    except LookupError:
        pass
    else:
        raise AssertionError(f"{freed[0]} is still there after retain: rows that no batch needs are to be freed")
    rollouts = [Rollout(*place, reward=1.0, tokens=1, payload=row) for place, row in zip(kept, rows, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        store.save(rollouts, Path(folder) / "rows")
        loaded = make()
        unfinished = loaded.load(Path(folder) / "rows")
        assert not set(unfinished) & set(kept), "load returns finished rollouts as unfinished ones"
        assert all(map(same, loaded.get(kept), rows)), "other rows are loaded than were saved"


def check_gate(make: Callable[[], Gate], groups: Sequence[Group]) -> None:
    """A gate of yours judges only what it is shown, and goes on from its state as if it had not stopped."""
    gate, half = make(), len(groups) // 2
    assert isinstance(gate.reason, str), f"reason={gate.reason!r}: a word that names the gate in the accounts"
    _check_judgement(gate, groups[:half])
    again = make()
    if state := gate.state_dict():
        again.load_state_dict(_on_disk(state))
    later, reborn = _check_judgement(gate, groups[half:]), _check_judgement(again, groups[half:])
    assert later[:2] == reborn[:2], "saved and loaded, it judges otherwise: state_dict misses something"
    combined = gate.combined([later.metrics, reborn.metrics], groups)
    assert all(isinstance(value, (int, float)) for value in combined.values()), "metrics must be numbers"


def _check_judgement(gate: Gate, groups: Sequence[Group]) -> Any:
    gate.prepare(groups)
    judgement = gate.judge(groups)
    trained = {(rollout.uid, rollout.index) for group in groups for rollout in group.rollouts}
    refused, cut = ({(uid, index) for uid, some in of.items() for index in some} for of in judgement[:2])
    assert refused | cut <= trained, f"it names rollouts that it was not shown: {sorted((refused | cut) - trained)[:5]}"
    assert not refused & cut, f"it refuses and cuts the same rollouts: {sorted(refused & cut)[:5]}"
    return judgement


class _Watched(Backend):
    """A backend that checks what it passes on."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.asked: Counter[Place] = Counter()
        self.told: Counter[Place] = Counter()
        self.cancelled: set[str] = set()

    @property
    def room(self) -> int | None:
        return self.inner.room

    def refilling(self) -> AbstractContextManager[None]:
        return self.inner.refilling()

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked.update((request.uid, index) for request, index, _ in places(requests))
        self.inner.submit(requests)

    def events(self, within: float | None = None) -> Iterator[Event]:
        for event in self.inner.events(within):
            place = event.uid, event.index
            self.told[place] += 1
            assert place in self.asked, f"{event} was not asked for"
            assert self.told[place] <= self.asked[place], f"{place} is told of twice"
            cancelled = isinstance(event, Failure) and event.reason == CANCELLED
            assert not cancelled or event.uid in self.cancelled, f"{event} says it was cancelled, which it was not"
            yield event

    def cancel(self, uids: Sequence[str]) -> None:
        self.cancelled.update(uids)
        self.inner.cancel(uids)

    def pause(self) -> Iterable[Paused]:
        return self.inner.pause()

    def resume(self) -> None:
        self.inner.resume()

    def drain(self) -> None:
        self.inner.drain()


def _on_disk(state: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        save_state(state, Path(folder) / "state.npz")
        return load_state(Path(folder) / "state.npz")
