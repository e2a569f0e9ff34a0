"""Groups that are trained again: what the collector keeps of them, whatever the engine and the moment it is cut."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from builders import reloaded, source
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.core.driver import FaultyEngine, Log, run, take, train, turn

from goldilocks.core import Collector, Limits, Replay, Surplus
from goldilocks.core.allocators import Adaptive, Fixed
from goldilocks.core.filters import Everything, Variance
from goldilocks.core.selectors import Uniform
from goldilocks.types import is_informative, signal

STEPS = 6
cases = st.fixed_dictionaries(
    {
        "replay": st.builds(
            Replay,
            groups=st.integers(1, 9),
            max_age=st.integers(1, 4),
            max_uses=st.integers(1, 3),
            prefer=st.sampled_from(["newest", "signal"]),
        ),
        "adaptive": st.booleans(),
        "filtered": st.booleans(),
        "carry": st.integers(0, 1),
        "seed": st.integers(0, 2**31),
    }
)
properties = settings(max_examples=settings.default.max_examples // 2)  # every example is a run


def make(case: dict[str, Any]) -> Collector:
    return Collector(
        source(60),
        Uniform(),
        Adaptive(max_n=8, stop="contrast", max_train_n=3) if case["adaptive"] else Fixed(4),
        Variance() if case["filtered"] else Everything(),
        target_groups=5,
        gen_batch_size=8,
        limits=Limits(),
        surplus=Surplus(case["carry"]),
        replay=case["replay"],
        seed=case["seed"],
    )


def collect(case: dict[str, Any]) -> tuple[Collector, Log]:
    collector = make(case)
    return collector, run(collector, FaultyEngine(case["seed"]), STEPS)


@properties
@given(cases)
def test_a_batch_is_its_fresh_groups_and_behind_them_informative_ones_that_were_trained_before(case):
    _, log = collect(case)
    trained: Counter[str] = Counter()
    for step, batch in enumerate(log.batches):
        fresh, again = batch[:5], batch[5:]
        assert all(group.replays == 0 for group in fresh)
        assert len(again) <= case["replay"].groups
        assert len({group.uid for group in batch}) == len(batch)
        for group in again:
            assert is_informative(group)
            assert trained[group.uid] == group.replays, "it was trained once, and again as often as it says"
            assert 1 <= step - group.version <= case["replay"].max_age
            assert group.replays <= case["replay"].max_uses
        trained.update(group.uid for group in batch)


@properties
@given(cases)
def test_it_is_trained_again_as_it_was_trained_first(case):
    _, log = collect(case)
    first: dict[str, Any] = {}
    for group in (group for batch in log.batches for group in batch):
        kept = first.setdefault(group.uid, group)
        assert (group.trained, group.rollouts, group.version) == (kept.trained, kept.rollouts, kept.version)


@properties
@given(cases)
def test_it_changes_neither_what_is_generated_nor_the_accounts(case):
    with_replay, log = collect(case)
    without, plain = collect({**case, "replay": Replay()})
    assert with_replay.accounts.state_dict() == without.accounts.state_dict(), "a token is generated once"
    fresh = [[group.uid for group in batch if not group.replays] for batch in log.batches]
    assert fresh == [[group.uid for group in batch] for batch in plain.batches]
    again = [rollout for batch in log.batches for group in batch if group.replays for rollout in group.trained]
    assert with_replay.metrics()["replay/total_rollouts"] == len(again)
    assert with_replay.metrics()["replay/total_tokens"] == sum(rollout.tokens for rollout in again)
    assert not any(name.startswith("replay/") for name in without.metrics())


@properties
@given(cases, st.data())
def test_cut_anywhere_saved_and_loaded_it_goes_on_the_same(tmp_path_factory, case, data):
    _, whole = collect(case)
    collector, engine, log = make(case), FaultyEngine(case["seed"]), Log()
    file = tmp_path_factory.mktemp("state") / "state.npz"
    cut_turns = data.draw(st.sets(st.integers(0, 60), min_size=1, max_size=6))
    cut_in_hand = data.draw(st.sets(st.integers(0, STEPS - 1), max_size=2))
    turns = itertools.count()

    for step in range(STEPS):
        while not collector.ready:
            turn(collector, engine, log)
            collector = reloaded(collector, make(case), file) if next(turns) in cut_turns else collector
        take(collector, engine, log)
        collector = reloaded(collector, make(case), file) if step in cut_in_hand else collector
    assert log.decisions == whole.decisions


@properties
@given(cases)
def test_payloads_stay_alive_until_a_group_cannot_be_trained_again(case):
    collector, engine, log = make(case), FaultyEngine(case["seed"]), Log()
    promised: set[str] = set()
    for _ in range(STEPS):
        batch = train(collector, engine, log)
        again = {group.uid for group in batch if group.replays}
        assert again <= promised
        assert {group.uid for group in batch} <= collector.alive
        promised = {group.uid for group in collector.reusable}
        needed = {(rollout.uid, rollout.index) for rollout in collector.waiting_rollouts}
        assert {(one.uid, one.index) for group in collector.reusable for one in group.trained} <= needed


def second_batch() -> tuple[Collector, FaultyEngine, Log, Any]:
    """A run in whose second batch of five groups four more are trained again."""
    case = {"replay": Replay(groups=4, max_age=3), "adaptive": False, "filtered": True, "carry": 1, "seed": 3}
    collector, engine, log = make(case), FaultyEngine(3), Log()
    train(collector, engine, log)
    return collector, engine, log, train(collector, engine, log)


def test_a_batch_that_is_put_back_uses_nothing_up():
    collector, _, _, batch = second_batch()
    collector.put_back()
    assert collector.in_hand == ()
    assert [group.uid for group in collector.take()] == [group.uid for group in batch]
    assert collector.metrics()["replay/groups"] == 4
    assert [group.replays for group in collector.in_hand] == [0] * 5 + [1] * 4


def test_after_a_rejection_only_fresh_groups_are_handed_out_in_its_place():
    collector, engine, log, batch = second_batch()
    collector.reject([batch[0].uid], "gate")
    more = train(collector, engine, log)
    assert [group.replays for group in more] == [0]
    assert sorted(group.replays for group in collector.in_hand) == [0] * 5 + [1] * 4


@pytest.mark.parametrize("prefer", ["newest", "signal"])
def test_what_is_preferred_comes_first(prefer):
    case = {"replay": Replay(groups=2, max_age=4, max_uses=9, prefer=prefer), "adaptive": False, "filtered": False,
            "carry": 0, "seed": 8}  # fmt: skip
    collector, engine, log = make(case), FaultyEngine(8), Log()
    for _ in range(STEPS):
        waiting = {group.uid: group for group in collector.reusable}
        again = [group for group in train(collector, engine, log) if group.replays]
        left = [waiting[uid] for uid in waiting.keys() - {group.uid for group in again}]
        left = [group for group in left if collector.step - group.version <= 4 and group.replays < 9]
        value = signal if prefer == "signal" else lambda group: group.version
        assert not again or not left or min(map(value, again)) >= max(map(value, left))


def test_metrics_say_how_many_how_old_and_how_often():
    case = {
        "replay": Replay(groups=3, max_age=2, max_uses=2),
        "adaptive": False,
        "filtered": True,
        "carry": 0,
        "seed": 1,
    }
    collector, log = collect(case)
    again = [group for group in log.batches[-1] if group.replays]
    values = collector.metrics()
    assert values["replay/groups"] == len(again) == 3
    assert values["replay/rollouts"] == sum(len(group.trained) for group in again)
    assert values["replay/age_mean"] == sum(STEPS - 1 - group.version for group in again) / 3
    assert values["replay/uses_mean"] == sum(group.replays for group in again) / 3


@pytest.mark.parametrize(("key", "value"), [("groups", -1), ("max_age", 0), ("max_uses", 0), ("prefer", "oldest")])
def test_settings_out_of_range_are_named(key, value):
    with pytest.raises(ValueError, match=f"replay.{key}={value!r}"):
        Replay(**{key: value})
