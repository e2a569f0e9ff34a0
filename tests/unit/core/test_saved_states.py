"""Collectors that version 0.1 saved are loaded and go on as they would have.

Each folder of ``saved_states`` has the state that commit 2054de3 wrote, and what that version then did. ``open`` was
saved within a step, with open, paused and carried groups; ``in_hand`` after ``take`` and ``reject``, with groups in
hand, carried, dropped and to be trained again.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from goldilocks.core import Collector, Limits, ListSource, Replay, Surplus
from goldilocks.core.allocators import Adaptive
from goldilocks.core.filters import Variance
from goldilocks.core.selectors import Greso
from goldilocks.runs.checkpoints import load_state
from goldilocks.types import Failure, OnExhausted, OnFull, Paused, Rollout

SAVED = Path(__file__).parent / "saved_states"
PROMPTS, STEPS = 40, 4
Pending = list[list[Any]]  # group, index, prompt


def collector(on_full: OnFull) -> Collector:
    return Collector(
        ListSource([f"prompt {index}" for index in range(PROMPTS)]),
        Greso(),
        Adaptive(max_n=8, rollouts_per_batch=2, max_train_n=4),
        Variance(),
        target_groups=4,
        gen_batch_size=8,
        limits=Limits(max_num_gen_batches=20, on_exhausted=OnExhausted.BACKFILL),
        surplus=Surplus(2, on_full),
        replay=Replay(groups=2, max_age=4, max_uses=2),
        seed=3,
    )


def outcome(uid: str, index: int, prompt: int) -> Rollout | Failure:
    rng = random.Random(f"{uid} {index}")
    if rng.random() < 0.1:
        return Failure(uid, index, "lost", tokens=rng.randint(0, 5))
    reward = float(rng.random() < prompt / (PROMPTS - 1))
    return Rollout(uid, index, reward, rng.randint(1, 30), {"acc": 1.0}, payload=f"{uid}/{index}")


def turn(one: Collector, pending: Pending, log: list[Any]) -> None:
    """Ask, answer five of what is in flight, and cancel."""
    for request in one.requests(room=24 - len(pending)):
        log.append([request.uid, request.prompt.index, request.n, request.first, request.visit])
        pending += [[request.uid, request.first + place, request.prompt.index] for place in range(request.n)]
    random.Random(len(log)).shuffle(pending)
    for uid, index, prompt in pending[:5]:
        one.observe(outcome(uid, index, prompt))
    del pending[:5]
    gone = one.cancelled()
    log.append(gone)
    pending[:] = [item for item in pending if item[0] not in gone]


def steps(one: Collector, pending: Pending, log: list[Any], count: int) -> None:
    for step in range(count):
        while not one.ready:
            turn(one, pending, log)
        batch = one.take()
        log.append([[group.uid, group.replays, [rollout.index for rollout in group.trained]] for group in batch])
        if step % 2 == 0:
            log.append(list(one.reject([batch[0].uid], "batch_filter")))
        if one.surplus.pauses:
            for uid, index, _ in pending[:3]:
                one.observe(Paused(uid, index, 2))


@pytest.mark.parametrize(("folder", "on_full"), [("open", OnFull.PARTIAL), ("in_hand", OnFull.FINISH)])
def test_a_state_of_version_0_1_goes_on_as_that_version_did(folder: str, on_full: OnFull) -> None:
    state, then = load_state(SAVED / folder / "state.npz"), json.loads((SAVED / folder / "then.json").read_text())
    one, log = collector(on_full), []
    one.load_state_dict(state)
    steps(one, then["pending"], log, STEPS)
    one.accounts.check()
    assert json.loads(json.dumps(log)) == then["log"]
    assert one.accounts.state_dict() == {**then["accounts"], "tool_tokens": 0}  # which that version did not count
    assert one.state_dict().keys() == state.keys()
