"""Checks for a policy of your own: does it keep the promises the collector relies on?

    def test_my_allocator():
        check_allocator(lambda: MyAllocator(n=4))

Each takes a function that makes a fresh policy, drives a real ``Collector`` over prompts of every difficulty, faults
mixed in, and raises ``AssertionError`` with what went wrong. They check: what is answered is in range; the same seed
gives the same decisions; a run that is cut, saved and loaded goes on the same; the state is JSON values and arrays.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from goldilocks.core import Collector, Limits, ListSource
from goldilocks.core.allocators import Allocator, Fixed
from goldilocks.core.filters import Everything, Filter
from goldilocks.core.selectors import Selector, Uniform
from goldilocks.runs.checkpoints import load_state, save_state
from goldilocks.types import Failure, Group, OnExhausted, Prompt, Rollout, Verdict

PROMPTS = 60
TARGET = 8


def check_selector(make: Callable[[], Selector]) -> None:
    """A selector of yours keeps its promises. If it needs features, it is given one: how easy each prompt is."""

    def ready() -> Selector:
        selector = make()
        if selector.needs_features:
            selector.use_features(np.stack([np.ones(PROMPTS), np.linspace(-2, 2, PROMPTS)], axis=1))
        return selector

    _check(lambda: _collector(selector=ready()))


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
    selector: Selector | None = None, allocator: Allocator | None = None, filter: Filter | None = None
) -> Collector:
    return Collector(
        ListSource([f"prompt {index}" for index in range(PROMPTS)]),
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


def _drive(make: Callable[[], Collector], *, cut: bool, steps: int = 5) -> list[Any]:
    """Every decision of a short run; with ``cut``, the collector is saved and made anew at every turn."""
    collector, turn = make(), 0
    log: list[Any] = []
    pending: list[tuple[str, int, int]] = []
    for _ in range(steps):
        while not collector.ready:
            turn += 1
            collector = _reborn(make, collector) if cut else collector
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


def _reborn(make: Callable[[], Collector], collector: Collector) -> Collector:
    with tempfile.TemporaryDirectory() as folder:
        save_state(collector.state_dict(), Path(folder) / "state.npz")
        fresh = make()
        fresh.load_state_dict(load_state(Path(folder) / "state.npz"))
    return fresh
