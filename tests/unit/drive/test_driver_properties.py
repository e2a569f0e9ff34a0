"""What the driver keeps, whatever the backend, the policies, the faults, the gate and the moment it is killed."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from typing import Any

import pytest
from builders import plain_collector
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.core.test_collector_properties import cases as core_cases
from unit.core.test_collector_properties import make
from unit.drive.drive_world import BACKENDS, DrawnGate, Killed, Rows

from goldilocks.core import Collector, Exhausted, Limits
from goldilocks.core.allocators import Adaptive
from goldilocks.drive.driver import Driver
from goldilocks.types import Group, StopRule

STEPS = 4
drives = st.fixed_dictionaries(
    {
        "backend": st.sampled_from(sorted(BACKENDS)),
        "gated": st.booleans(),
        "refused": st.sampled_from([0.0, 0.05, 0.3]),
        "cut": st.sampled_from([0.0, 0.3]),
    }
)
cases = st.builds(lambda core, drive: {**core, **drive}, core_cases, drives)
properties = settings(max_examples=settings.default.max_examples * 2 // 5)  # every example is a run


class Checked(Collector):
    """A collector whose accounts are checked at every event."""

    def observe(self, event: Any) -> None:
        super().observe(event)
        self.accounts.check()


def driver(case: dict[str, Any], dies_at: float = math.inf) -> Driver:
    collector = make(case)
    collector.__class__ = Checked
    rows = Rows()
    backend = BACKENDS[case["backend"]](case["seed"], rows, dies_at)
    gate = DrawnGate(case["seed"], case["refused"], case["cut"], rows) if case["gated"] else None
    return Driver(collector, backend, rows, gate)


def plain(groups: tuple[Group, ...]) -> list[Any]:
    """A batch in what decides an update."""
    return [
        (group.uid, group.prompt.key, group.rewards, [one.index for one in group.trained], group.version)
        for group in groups
    ]


def batches(of: Driver, steps: int = STEPS) -> list[list[Any]]:
    """Train so many batches, or as many as the limits and the gate allow."""
    seen: list[list[Any]] = []
    try:
        for _ in range(steps):
            seen.append(plain(of.batch()))
    except Exhausted:
        of.put_back()
    return seen


@properties
@given(cases)
def test_every_token_has_an_account_and_what_is_trained_is_what_the_batches_say(case: dict[str, Any]) -> None:
    subject = driver(case)
    seen = batches(subject)
    assert all(len(batch) <= case["target_groups"] for batch in seen), "whatever the limits"
    trained = [group for batch in seen for group in batch]
    accounts = subject.collector.accounts
    accounts.check()
    classes = accounts.by_class(accounts.rollouts)
    assert classes["trained"] + classes["backfilled"] == sum(len(group[3]) for group in trained)
    assert classes["carried"] == sum(len(group) for group in subject.collector.kept)


@properties
@given(cases)
def test_a_batch_is_full_unless_the_limits_say_otherwise(case: dict[str, Any]) -> None:
    seen = batches(driver({**case, "limits": Limits(), "refused": min(case["refused"], 0.05)}))
    assert [len(batch) for batch in seen] == [case["target_groups"]] * STEPS


@properties
@given(cases)
def test_every_group_is_judged_once_and_nothing_that_was_refused_is_trained(case: dict[str, Any]) -> None:
    subject = driver({**case, "gated": True})
    gate = subject.gate
    assert isinstance(gate, DrawnGate)
    for batch in batches(subject):
        assert not {(uid, index) for uid, _, _, indices, _ in batch for index in indices} & gate.refused
        assert all(indices for _, _, _, indices, _ in batch), "no group is left without a row to train"
        assert {group[0] for group in batch} <= set(gate.prepared)
    assert max(Counter(gate.judged).values(), default=0) <= 1


@properties
@given(cases)
def test_rows_are_there_for_as_long_as_a_batch_may_need_them_and_no_longer(case: dict[str, Any]) -> None:
    subject = driver(case)
    rows = subject.rows
    assert isinstance(rows, Rows)
    try:
        for _ in range(STEPS):
            for group in subject.batch():
                rows.get([(rollout.uid, rollout.index) for rollout in group.rollouts])
            assert set(rows.groups) <= subject.collector.alive
    except Exhausted:
        pass


@properties
@given(cases, st.integers(1, STEPS - 1), st.integers(1, 150))
def test_killed_at_any_event_a_run_goes_on_from_its_last_checkpoint_with_the_same_batches(
    tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any], saved: int, dies_after: int
) -> None:
    uncut = driver(case)
    whole = batches(uncut)
    folder = tmp_path_factory.mktemp("checkpoint")
    subject = driver(case)
    before = batches(subject, steps=saved)
    if len(before) < saved:
        return  # the limits ended the run before there was a checkpoint
    subject.save(folder, note="the trainer's")
    _kill(subject, dies_after)
    reborn = driver(case)
    assert reborn.load(folder)["note"] == "the trainer's"
    assert before + batches(reborn, steps=STEPS - saved) == whole
    for subject in (uncut, reborn):
        subject.collector.reissue(known=subject.collector.paused)  # a cut cancels early what is left of closed groups
    assert reborn.collector.accounts.state_dict() == uncut.collector.accounts.state_dict()


def _kill(subject: Driver, dies_after: int) -> None:
    """Go on until the process dies, if it does not end before."""
    engine: Any = getattr(subject.backend, "_engine", subject.backend)
    engine.dies_at = dies_after
    with contextlib.suppress(Killed, Exhausted):
        subject.batch()


@properties
@given(
    st.builds(
        Adaptive,
        max_n=st.integers(8, 20),
        rollouts_per_batch=st.integers(1, 8),
        min_rollouts=st.integers(1, 5),
        stop=st.sampled_from(StopRule),
    ),
    st.integers(0, 2**31),
)
def test_chunks_make_the_same_groups_where_rollouts_end_singly_and_in_rounds(allocator: Adaptive, seed: int) -> None:
    """V1 and the simulator have rollouts that end one by one, V0 and TRL rounds that end whole."""
    found: list[dict[str, list[Any]]] = []
    for backend in BACKENDS.values():
        collector = plain_collector(40, allocator=allocator, target_groups=4, gen_batch_size=8)
        rows = Rows()
        subject = Driver(collector, backend(seed, rows, math.inf), rows)
        groups = [group for _ in range(2) for group in subject.batch()]
        assert all(len(group.trained) == len(group) for group in groups), "what was generated is trained"
        found.append({group.uid: [(one.index, one.reward) for one in group.trained] for group in groups})
    first, *others = found
    for other in others:
        both = first.keys() & other.keys()
        assert both
        assert {uid: first[uid] for uid in both} == {uid: other[uid] for uid in both}
