"""Rollouts that stop when the batch is full and go on after the update: nothing is lost, favoured or charged twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.core.driver import FaultyEngine, Log, run, take
from unit.core.test_collector_properties import cases, make

from goldilocks.core import Collector, Limits, ListSource, Surplus
from goldilocks.core.allocators import Fixed
from goldilocks.core.filters import Everything
from goldilocks.core.selectors import Uniform
from goldilocks.runs.checkpoint import load_state, save_state
from goldilocks.types import Failure, Paused, Request, Rollout

partial = st.builds(Surplus, max_carry_steps=st.integers(1, 4), on_full=st.just("partial"))
partial_cases = st.builds(lambda case, surplus: {**case, "limits": Limits(), "surplus": surplus}, cases, partial)
properties = settings(max_examples=15)


def collector(carry: int = 2, **given: Any) -> Collector:
    chosen = {"target_groups": 2, "gen_batch_size": 4, "surplus": Surplus(carry, "partial"), **given}
    return Collector(ListSource(range(50)), Uniform(), Fixed(2), Everything(), **chosen)


def finish(subject: Collector, request: Request, tokens: int = 10) -> None:
    for index in range(request.first, request.first + request.n):
        subject.observe(Rollout(request.uid, index, float(index % 2), tokens))


class Silent(FaultyEngine):
    """Never says that it pauses."""

    def pause(self) -> list[Paused]:
        return []


@properties
@given(partial_cases)
def test_where_rollouts_pause_changes_no_decision(case: dict[str, Any]) -> None:
    told = run(make(case), FaultyEngine(case["seed"]), steps=4)
    untold = run(make(case), Silent(case["seed"]), steps=4)
    assert told.decisions == untold.decisions


@properties
@given(partial_cases)
def test_a_token_is_charged_once_and_in_the_step_that_wrote_it(case: dict[str, Any]) -> None:
    subject, log = make(case), Log()
    engine = FaultyEngine(case["seed"], duplicate_rate=0.0, late_rate=1.0)  # so that everything that is aborted comes
    ended = 0
    cancelled: set[str] = set()
    for _ in range(4):
        while not subject.ready:
            for request in subject.requests(room=engine.free):
                engine.submit(request)
            for event in engine.step():
                subject.observe(event)
                ended += event.tokens
            cancelled.update(subject.cancelled())
        take(subject, engine, log)
        assert subject.accounts.generated_tokens == ended + sum(subject.paused.values())
        needed = [(uid, index) for uid, index, _ in engine.pending if uid not in cancelled]
        written = {(uid, index): engine.written[f"{uid}/{index}"] for uid, index in needed}
        assert written == {name: tokens for name, tokens in subject.paused.items() if name[0] not in cancelled}


@properties
@given(partial_cases)
def test_no_group_is_given_up_and_none_is_trained_too_old(case: dict[str, Any]) -> None:
    subject = make({**case, "policy": "grpo"})
    log = run(subject, FaultyEngine(case["seed"], failure_rate=0.0), steps=5)
    assert not [decision for decision in log.decisions if decision[0] == "cancel"]
    for step, batch in enumerate(log.batches):
        assert all(step - group.version <= case["surplus"].max_carry_steps for group in batch)


@properties
@given(partial_cases, st.integers(1, 3))
def test_a_restart_asks_for_what_was_paused_and_charges_only_what_is_new(
    tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any], steps: int
) -> None:
    engine = FaultyEngine(case["seed"], failure_rate=0.0, duplicate_rate=0.0, late_rate=0.0)
    first = make(case)
    run(first, engine, steps=steps)
    path = tmp_path_factory.mktemp("state") / "collector.npz"
    save_state(first.state_dict(), path)
    second = make(case)
    second.load_state_dict(load_state(path))
    second.reissue(known=second.paused)
    flights = {(uid, index): second.paused[uid, index] for uid, index, _ in engine.pending}
    assert second.paused == flights
    charged = second.accounts.generated_tokens
    engine.pending = []
    for request in second.requests():
        engine.submit(request)
    asked = [(uid, index) for uid, index, _ in engine.pending]
    assert set(flights) <= set(asked)
    totals = [engine.outcome(uid, index, prompt).tokens for uid, index, prompt in engine.pending]
    for uid, index, prompt in list(engine.pending):
        second.observe(engine.outcome(uid, index, prompt))
        second.accounts.check()
    assert second.accounts.generated_tokens == charged + sum(totals) - sum(flights.values())


def test_a_prefix_that_is_lost_stays_charged_and_its_rollout_begins_anew() -> None:
    subject = collector()
    requests = subject.requests()
    for request in requests[:2]:
        finish(subject, request)
    subject.take()
    for request in requests[2:]:
        subject.observe(Paused(request.uid, 0, 7))
    kept, lost = ((request.uid, 0) for request in requests[2:])
    subject.reissue(known=[kept])
    assert subject.paused == {kept: 7}
    assert subject.accounts.tokens["paused"] == 7
    assert subject.accounts.tokens["cancelled"] == 7
    again = {(request.uid, request.first, request.n) for request in subject.requests()}
    assert {(kept[0], 0, 2), (lost[0], 0, 2)} <= again
    for request in requests[2:]:
        finish(subject, request)
    assert subject.accounts.tokens["paused"] == 0
    assert subject.accounts.generated_tokens == 2 * 20 + 2 * 20 + 7  # what was lost has been written twice


def test_the_batch_waits_for_a_group_that_would_be_too_old_after_the_update() -> None:
    subject = collector(carry=1)
    slow, *others = subject.requests()
    for request in others[:2]:
        finish(subject, request)
    assert subject.ready  # the slow one is of this step, and may go on in the next
    subject.take()
    more = subject.requests()
    for request in (others[2], *more):
        finish(subject, request)
    assert not subject.ready
    finish(subject, slow)
    assert subject.ready
    assert subject.take()[0].uid == slow.uid


def test_as_many_groups_are_open_as_a_generation_batch_has_until_the_batch_is_full() -> None:
    subject = collector()
    first = subject.requests()
    assert len(first) == 4
    finish(subject, first[0])
    assert len(subject.requests()) == 1  # one more is missing, which the three open ones would give too
    finish(subject, first[1])
    assert subject.ready
    assert not subject.requests()


def test_a_paused_rollout_that_fails_costs_what_it_has_written_in_all() -> None:
    subject = collector()
    request = subject.requests()[0]
    subject.observe(Paused(request.uid, 0, 5))
    subject.observe(Paused(request.uid, 0, 9))
    assert subject.metrics()["train/rollouts_paused"] == 1
    assert (subject.accounts.generated_rollouts, subject.accounts.generated_tokens) == (1, 9)
    subject.observe(Failure(request.uid, 0, "engine", 12))
    assert (subject.accounts.generated_rollouts, subject.accounts.generated_tokens) == (1, 12)
    assert subject.accounts.tokens["failed"] == 12


def test_partial_rollouts_need_groups_that_may_be_older_than_the_policy() -> None:
    with pytest.raises(ValueError, match=r"surplus.max_carry_steps=0 is not accepted: 1 or more with on_full=partial"):
        Surplus(0, "partial")


def test_for_an_engine_that_never_stops_groups_are_begun_while_a_batch_is_full() -> None:
    subject = collector(ahead=2)
    first = subject.requests()
    for request in first[:2]:
        finish(subject, request)
    assert subject.ready
    assert len(subject.requests()) == 2  # two of four are open, and the batch ahead has none
    finish(subject, first[2])
    finish(subject, first[3])
    assert not subject.requests()  # a batch and another are kept
    assert [group.uid for group in subject.take()] == ["g0", "g1"]
