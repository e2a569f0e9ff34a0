"""Rollouts that stop when the batch is full and go on after the update: nothing is lost, favoured or charged twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import answer, plain_collector, reloaded
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.core.driver import MAX_TOKENS, FaultyEngine, Log, run, take, turn
from unit.core.test_collector_properties import cases, make

from goldilocks.core import Collector, Exhausted, Limits, Surplus
from goldilocks.core.filters import Variance
from goldilocks.types import Failure, Paused, Request, Rollout

partial = st.builds(Surplus, max_carry_steps=st.integers(1, 4), on_full=st.just("partial"))
partial_cases = st.builds(lambda case, surplus: {**case, "limits": Limits(), "surplus": surplus}, cases, partial)
limited = st.builds(
    Limits,
    max_rollouts_per_step=st.sampled_from([40, 60, 100]),
    max_tokens_per_step=st.sampled_from([None, 3_000]),
    max_tokens_per_rollout=st.just(MAX_TOKENS),
    on_exhausted=st.sampled_from(["shrink", "backfill"]),
)
limited_cases = st.builds(lambda case, limits: {**case, "limits": limits}, partial_cases, limited)
properties = settings(max_examples=15)


def collector(carry: int = 2, **given: Any) -> Collector:
    chosen = {"target_groups": 2, "gen_batch_size": 4, "surplus": Surplus(carry, "partial"), **given}
    return plain_collector(50, **chosen)


class Silent(FaultyEngine):
    """Never says that it pauses."""

    def pause(self) -> list[Paused]:
        return []


@properties
@given(partial_cases)
def test_where_rollouts_pause_changes_no_decision(case: dict[str, Any]) -> None:
    told = run(make(case), FaultyEngine(case["seed"]), steps=4)
    assert told.decisions == run(make(case), Silent(case["seed"]), steps=4).decisions


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
    log = run(make({**case, "policy": "grpo"}), FaultyEngine(case["seed"], failure_rate=0.0), steps=5)
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
    second = taken_up(case, first, tmp_path_factory.mktemp("state") / "collector.npz")
    flights = {(uid, index): second.paused[uid, index] for uid, index, _ in engine.pending}
    assert second.paused == flights
    charged = second.accounts.generated_tokens
    engine.pending = []
    for request in second.requests():
        engine.submit(request)
    assert set(flights) <= {(uid, index) for uid, index, _ in engine.pending}
    totals = [engine.outcome(uid, index, prompt).tokens for uid, index, prompt in engine.pending]
    for uid, index, prompt in list(engine.pending):
        second.observe(engine.outcome(uid, index, prompt))
        second.accounts.check()
    assert second.accounts.generated_tokens == charged + sum(totals) - sum(flights.values())


class Restarted(FaultyEngine):
    """Loses everything when it is restarted, and goes on in the same order once it is asked for that again."""

    lost: Sequence[Any] = ()

    def restart(self) -> None:
        self.lost, self.pending = self.pending, []

    def step(self) -> list[Rollout | Failure]:
        assert [item for item in self.lost if item not in self.pending] == []
        self.pending = [*self.lost, *(item for item in self.pending if item not in self.lost)]
        self.lost = ()
        return super().step()


def decisions(case: dict[str, Any], cut: int, path: Path) -> tuple[list[Any], dict[str, float]]:
    """Those of four steps, and the metrics. Before turn ``cut`` the run is saved, killed and taken up again.

    At the end the engine is gone. What it still held of closed groups is cancelled then; a cut cancels it earlier.
    """
    subject, engine, log, turns = make(case), Restarted(case["seed"], late_rate=0.0), Log(), 0
    try:
        for _ in range(4):
            while not subject.ready:
                if turns == cut:
                    subject = taken_up(case, subject, path)
                    engine.restart()
                turns += 1
                turn(subject, engine, log)
            take(subject, engine, log)
    except Exhausted:
        log.decisions.append(["exhausted"])
    subject.reissue(known=subject.paused)
    return once(log.decisions), subject.metrics()


def taken_up(case: dict[str, Any], before: Collector, path: Path) -> Collector:
    """Return the collector of a restart, which asks again for what was in flight."""
    after = reloaded(before, make(case), path)
    after.reissue(known=after.paused)
    return after


def once(log: list[Any]) -> list[Any]:
    """The decisions without the requests for what was asked for before."""
    asked: set[tuple[str, int]] = set()
    first_time: list[Any] = []
    for one in log:
        new = set()
        if one[0] == "ask":
            uid, n, first = one[1], one[3], one[4]
            new = {(uid, index) for index in range(first, first + n)} - asked
        if new or one[0] != "ask":
            first_time.append(one)
        asked |= new
    return first_time


@properties
@given(limited_cases, st.integers(1, 30))
def test_within_limits_a_run_that_is_cut_decides_as_if_uncut(
    tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any], cut: int
) -> None:
    path = tmp_path_factory.mktemp("state") / "collector.npz"
    assert decisions(case, cut, path) == decisions(case, -1, path)


def test_the_limit_of_a_step_is_not_charged_with_rollouts_of_the_step_before() -> None:
    limits = Limits(max_rollouts_per_step=12, on_exhausted="shrink")
    subject = collector(limits=limits, gen_batch_size=6, filter=Variance())
    requests = subject.requests()
    answer(subject, requests[:2])
    subject.take()
    for request in requests[2:]:
        for index in range(2):
            subject.observe(Paused(request.uid, index, 7))
    reborn = collector(limits=limits, gen_batch_size=6, filter=Variance())
    reborn.load_state_dict(subject.state_dict())
    reborn.reissue(known=reborn.paused)
    assert asked_in_vain(subject, requests[2:]) == 12
    assert asked_in_vain(reborn, []) == 8 + 12


def asked_in_vain(subject: Collector, open: list[Request]) -> int:
    """How many rollouts are asked for until the limits end a step whose groups are all dropped."""
    asked = 0
    while not subject.ready:
        requests = subject.requests()
        asked += sum(request.n for request in requests)
        answer(subject, (*open, *requests), rewards=(0.0,))
        open = []
    return asked


def test_a_prefix_that_is_lost_stays_charged_and_its_rollout_begins_anew() -> None:
    subject = collector()
    requests = subject.requests()
    answer(subject, requests[:2])
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
    answer(subject, requests[2:])
    assert subject.accounts.tokens["paused"] == 0
    assert subject.accounts.generated_tokens == 2 * 20 + 2 * 20 + 7  # what was lost has been written twice


def test_the_batch_waits_for_a_group_that_would_be_too_old_after_the_update() -> None:
    subject = collector(carry=1)
    slow, *others = subject.requests()
    answer(subject, others[:2])
    assert subject.ready  # the slow one is of this step, and may go on in the next
    subject.take()
    for request in (others[2], *subject.requests()):
        answer(subject, [request])
    assert not subject.ready
    answer(subject, [slow])
    assert subject.ready
    assert subject.take()[0].uid == slow.uid


def test_the_batch_waits_for_a_group_opened_later_that_an_older_rollout_made_too_old() -> None:
    subject = collector(carry=1)
    first, *others = subject.requests()
    answer(subject, others[:2])
    subject.take()
    _, late, *_ = subject.requests()
    answer(subject, [first, others[2]])
    subject.observe(Rollout(late.uid, 0, 1.0, tokens=10, version=0))
    assert not subject.ready
    subject.observe(Rollout(late.uid, 1, 0.0, tokens=10))
    assert subject.ready


def test_as_many_groups_are_open_as_a_generation_batch_has_until_the_batch_is_full() -> None:
    subject = collector()
    first = subject.requests()
    assert len(first) == 4
    answer(subject, [first[0]])
    assert len(subject.requests()) == 1  # one more is missing, which the three open ones would give too
    answer(subject, [first[1]])
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
    with pytest.raises(ValueError, match=r"filter_groups.max_carry_steps=0 is not accepted: 1 or more with on_full"):
        Surplus(0, "partial")


def test_for_an_engine_that_never_stops_groups_are_begun_while_a_batch_is_full() -> None:
    subject = collector(ahead=2)
    first = subject.requests()
    answer(subject, first[:2])
    assert subject.ready
    assert len(subject.requests()) == 2  # two of four are open, and the batch ahead has none
    answer(subject, [first[2]])
    answer(subject, [first[3]])
    assert not subject.requests()  # a batch and another are kept
    assert [group.uid for group in subject.take()] == ["g0", "g1"]
