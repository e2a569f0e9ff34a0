"""The loop from "I need a batch" to "here it is": a gate's refusals, what is not judged, failures, and the end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import plain_collector

from goldilocks.core import Collector, Exhausted, Limits, Surplus
from goldilocks.core.filters import Everything, Variance, build_filter
from goldilocks.core.limits import Budget
from goldilocks.drive.backend import Rounds, places
from goldilocks.drive.driver import GRADED_GROUPS, MAX_FAILURES, MAX_REFILLS, Driver, Epochs, Stalled
from goldilocks.drive.gate import Gate, Judgement
from goldilocks.drive.rows import MemoryRows, NoRows
from goldilocks.rewards import spent
from goldilocks.runs.history import Mean
from goldilocks.types import Event, Failure, Group, OnExhausted, Paused, Request, Rollout, Verdict


def graded(reward: Callable[[int], float]) -> Callable[[Sequence[Request]], Iterator[Rollout]]:
    """Return what answers each request; a rollout's reward follows from its number in the group."""
    return lambda requests: (Rollout(request.uid, index, reward(index), 3) for request, index, _ in places(requests))


answers, flat, ungraded = graded(float), graded(lambda index: 1.0), graded(lambda index: math.nan)


class Refuses(Gate):
    """Refuses the groups that it is told to; every call is written down."""

    reason = "gate"

    def __init__(self, *refused: str, everything: bool = False) -> None:
        self.refused, self.everything = refused, everything
        self.calls: list[list[str]] = []

    def judge(self, groups: Sequence[Group]) -> Judgement:
        self.calls.append([group.uid for group in groups])
        out = [group for group in groups if self.everything or group.uid in self.refused]
        metrics = {"batch/total_groups_generated": len(groups), "rejection/rate": Mean(len(out), len(groups))}
        return Judgement({group.uid: [0, 1] for group in out}, {}, metrics)


def driver(of: Collector, gate: Gate | None = None) -> Driver:
    return Driver(of, Rounds(answers), NoRows(), gate)


def test_what_is_refused_is_replaced_and_all_judgements_are_logged_as_one() -> None:
    gate = Refuses("g0", "g2")
    subject = driver(plain_collector(), gate)
    assert [group.uid for group in subject.batch()] == ["g1", "g3"]
    assert gate.calls == [["g0", "g1"], ["g2"], ["g3"]]
    metrics = subject.metrics()
    assert metrics["batch/total_groups_generated"] == 4
    assert metrics["rejection/rate"] == 0.5
    assert {type(value) for value in metrics.values()} <= {int, float}  # as loggers take them
    subject.batch()
    assert subject.metrics()["batch/total_groups_generated"] == 2


def test_a_gate_that_refuses_everything_ends_each_batch_after_so_many_refills() -> None:
    gate = Refuses(everything=True)
    subject = driver(plain_collector(1000, target_groups=3), gate)
    for batch in (1, 2):
        with pytest.raises(Exhausted, match=rf"After {MAX_REFILLS} refills 3 groups are missing"):
            subject.batch()
        assert len(gate.calls) == batch * (1 + MAX_REFILLS)
        subject.put_back()
    assert subject.metrics()["accounts/rejected_rollouts"] == 2 * 3 * 2 * (1 + MAX_REFILLS)


def test_an_update_that_was_cut_short_in_its_second_batch_begins_again_with_its_first() -> None:
    subject = driver(plain_collector())
    first = subject.batch()
    subject.collector.extend()  # and then Ctrl-C
    assert subject.batch() == first
    assert subject.metrics()["accounts/trained_rollouts"] == sum(map(len, first))


def failed(reason: str) -> Rounds:
    return Rounds(lambda requests: (Failure(request.uid, index, reason) for request, index, _ in places(requests)))


def test_dropped_groups_that_fill_a_batch_up_are_not_judged() -> None:
    class Nothing(Everything):
        def judge(self, group: Group) -> Verdict:
            return Verdict(False, "dull")

    limits = Limits(max_num_gen_batches=1, on_exhausted=OnExhausted.BACKFILL)
    of, gate = plain_collector(filter=Nothing(), limits=limits), Refuses(everything=True)
    assert len(Driver(of, Rounds(flat), NoRows(), gate).batch()) == 2
    assert gate.calls == []


def test_a_backend_is_woken_for_what_is_generated_after_the_trainer_has_begun_and_only_then() -> None:
    woken: list[str] = []

    class Sleeps(Rounds):
        @contextmanager
        def refilling(self) -> Iterator[None]:
            woken.append("up")
            yield
            woken.append("down")

    subject = Driver(plain_collector(), Sleeps(answers), NoRows(), Refuses("g0"))
    subject.take()
    assert woken == []
    subject.settle()
    assert woken == ["up", "down"]
    subject.batch()
    assert woken == ["up", "down"]


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (failed("no such model"), rf"{MAX_FAILURES} rollouts failed in a row; the last one: no such model"),
        (Rounds(ungraded), rf"{MAX_FAILURES} rollouts failed in a row; .* the reward was None"),
        (failed("RewardFailed"), r"goldilocks\.rewards\.on_failure=error: the last one: RewardFailed"),
    ],
    ids=["failures", "rewards that are no numbers", "a reward that must not fail"],
)
def test_so_many_failures_in_a_row_end_the_run_or_one_that_must_not_be(backend: Rounds, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        Driver(plain_collector(), backend, NoRows()).batch()


def test_a_step_in_which_every_rollout_failed_is_not_called_too_difficult() -> None:
    subject = plain_collector(filter=Variance(), limits=Limits(max_num_gen_batches=1, max_retries=0))
    with pytest.raises(Exhausted, match=r"every rollout of the step failed \(\d+ × .*: the reward was None"):
        Driver(subject, Rounds(ungraded), NoRows(), max_failures=math.inf).batch()


def test_a_run_that_keeps_nothing_says_so_and_says_it_again_after_twice_as_many(caplog: Any) -> None:
    """Few dropped groups are no news, however small a batch is."""
    subject = plain_collector(filter=Variance(), limits=Limits(max_num_gen_batches=160))
    with pytest.raises(Exhausted):
        Driver(subject, Rounds(flat), NoRows()).batch()
    said = [record.args[0] for record in caplog.records if "may never come" in record.message]
    assert len(said) == 3
    assert said[0] >= 64
    assert all(later >= 2 * earlier for earlier, later in itertools.pairwise(said))


def test_a_reward_that_fails_while_a_run_is_saved_ends_it_when_it_goes_on_and_not_the_save(tmp_path: Path) -> None:
    """Its rollout had its whole answer when the batch was full; its reward came during the update."""

    class Late(Rounds):
        def events(self, within: float | None = None) -> Iterator[Event]:
            return (event for event in super().events(within) if (event.uid, event.index) != ("g1", 1))

        def up_to_saved_moment(self) -> Iterable[Event]:
            return [Failure("g1", 1, "RewardFailed", 3)]

        def pause(self) -> Iterable[Paused]:
            return [Paused("g1", 1, 3)]

    of = plain_collector(target_groups=1, gen_batch_size=2, surplus=Surplus(1, "partial"))
    subject = Driver(of, Late(answers), NoRows())
    subject.batch()
    subject.save(tmp_path)
    assert (tmp_path / "goldilocks.npz").exists()
    with pytest.raises(RuntimeError, match=r"goldilocks\.rewards\.on_failure=error: the last one: RewardFailed"):
        subject.batch()


def test_what_rewards_cost_also_after_the_last_batch_is_in_the_accounts_and_in_a_checkpoint(tmp_path: Path) -> None:
    def paid(requests: Sequence[Request]) -> Iterator[Rollout]:
        for one in answers(requests):
            spent.add(calls=1, cost=0.5)
            yield one

    def subject() -> Driver:
        return Driver(plain_collector(), Rounds(paid), NoRows())

    spent.read()  # another test's
    before, after = subject(), subject()
    before.batch()
    spent.add(calls=3)  # of a validation before the checkpoint, or of a batch that could not be filled
    before.save(tmp_path)
    assert spent.read() == {}  # and is not counted again
    after.load(tmp_path)
    after.batch()
    totals = after.metrics()
    assert (totals["accounts/generated_rollouts"], totals["accounts/reward_calls"]) == (8, 8 + 3)
    assert totals["accounts/reward_cost"] == 4.0


def test_a_run_that_ends_while_it_saves_again_leaves_the_older_state_with_its_rows(tmp_path: Path) -> None:
    """Nothing was generated since: the rows of both states are as many."""
    before, after = (Driver(plain_collector(), Rounds(answers), SavedUntil(2)) for _ in range(2))
    before.save(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        before.save(tmp_path)
    after.load(tmp_path)
    before.save(tmp_path)
    assert len(list(tmp_path.glob("goldilocks_rows*"))) == 1  # of what was cut, nothing is left


class SavedUntil(MemoryRows[str]):
    """Rows that are written as one word; the process ends while it writes them for this time."""

    def __init__(self, ends: int) -> None:
        super().__init__()
        self._ends = ends

    def save(self, rollouts: Iterable[Rollout], folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._ends -= 1
        (folder / "rows").write_text("who" if not self._ends else "whole")
        if not self._ends:
            raise KeyboardInterrupt

    def load(self, folder: Path) -> tuple[()]:
        assert (folder / "rows").read_text() == "whole"
        return ()


def test_a_run_may_go_on_with_a_gate_without_state_in_the_place_of_one_that_had_some(tmp_path: Path) -> None:
    class Counts(Refuses):
        def state_dict(self) -> dict[str, Any]:
            return {"calls": len(self.calls)}

    driver(plain_collector(), Counts()).save(tmp_path)
    again = driver(plain_collector(), Refuses())
    again.load(tmp_path)
    assert len(again.batch()) == 2


@pytest.mark.parametrize("name", ["collector", "rows", "meter", "backend", "gate"])
def test_what_a_trainer_saves_beside_the_driver_cannot_take_its_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"also='{name}' is not accepted: another name"):
        driver(plain_collector()).save(tmp_path, **{name: 1})


@pytest.mark.parametrize(("rewards", "said"), [((-1.0, 0.0), "no reward"), ((1.0, 2.0), "every"), ((0.0, 1.0), "")])
def test_a_threshold_that_no_reward_crosses_is_said_once(
    rewards: tuple[float, float], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    subject = Driver(plain_collector(40, target_groups=GRADED_GROUPS), Rounds(graded(rewards.__getitem__)), NoRows())
    for _ in range(2):
        subject.batch()
        subject.metrics()
    warnings = [record.getMessage() for record in caplog.records if "positive_threshold=0.5" in record.getMessage()]
    assert len(warnings) == bool(said)
    assert all(warning.startswith(said) for warning in warnings)


def test_a_backend_that_says_nothing_or_loses_a_rollout_beside_a_full_batch_does_not_hang_the_run() -> None:
    class Loses(Rounds):
        asked = 0

        def events(self, within: float | None = None) -> Iterator[Event]:
            self.asked += 1
            assert self.asked < 10, "the driver asks for ever"
            return (event for event in super().events(within) if event.uid != "g2")

    of = plain_collector(gen_batch_size=3)
    of.ahead = 1  # a group beyond the batch
    with pytest.raises(Stalled, match="2 rollouts are in flight"):
        Driver(of, Loses(answers), NoRows()).batch()
    with pytest.raises(Stalled):
        Driver(plain_collector(), Rounds(lambda requests: ()), NoRows()).batch()


def test_where_rollouts_pause_they_are_paused_after_the_batch_and_resumed_before_the_next() -> None:
    calls: list[str] = []

    class Pauses(Rounds):
        def pause(self) -> Iterable[Paused]:
            calls.append("pause")
            return ()

        def resume(self) -> None:
            calls.append("resume")

    for surplus, expected in ((Surplus(1, "partial"), ["resume", "pause"] * 2), (Surplus(), [])):
        calls.clear()
        subject = Driver(plain_collector(surplus=surplus), Pauses(answers), NoRows())
        subject.batch()
        subject.batch()
        assert calls == expected


def test_a_run_is_over_when_its_budget_is_spent_or_its_epochs_are() -> None:
    of = plain_collector(6)
    subject = Driver(of, Rounds(answers), NoRows(), budget=Budget(rollouts=8))
    over = []
    for _ in range(2):
        subject.batch()
        over.append((subject.over, subject.metrics()["budget/spent"]))
    assert over == [(False, 0.5), (True, 1.0)]
    of = plain_collector(6)
    subject = Driver(of, Rounds(answers), NoRows(), epochs=Epochs(of, 1))
    assert "budget/spent" not in subject.metrics()
    assert [bool(subject.batch()) and subject.over for _ in range(3)] == [False, False, True]


def test_groups_of_failures_alone_that_pass_the_filter_are_said_once(caplog: Any) -> None:
    driver = Driver(plain_collector(filter=Variance("reward")), Rounds(graded(lambda index: 0.01 * index)), NoRows())
    for _ in range(3):
        driver.batch()
        driver.metrics()
    (said,) = [record.message for record in caplog.records if "only failures" in record.message]
    assert said.startswith("2 of the 2 groups of this batch")


def test_whether_such_groups_pass_is_seen_by_acc_and_behind_a_chain_of_filters(caplog: Any) -> None:
    """The shaped rewards of one group cross the threshold, but none of its answers is right."""

    def shaped(requests: Sequence[Request]) -> Iterator[Rollout]:
        for request, index, _ in places(requests):
            right = float(request.uid != "g0" and index)
            yield Rollout(request.uid, index, right or 0.9 * index, 3, metrics={"acc": right})

    chain = build_filter(["variance", "length"], {"metric": "reward"})
    for of, expected in ((plain_collector(filter=chain), 1), (plain_collector(filter=Everything()), 0)):
        caplog.clear()
        driver = Driver(of, Rounds(shaped), NoRows())
        driver.batch()
        driver.metrics()
        said = [record.message for record in caplog.records if "only failures" in record.message]
        assert len(said) == expected
        assert all(one.startswith("1 of the 2 groups of this batch") for one in said)


@pytest.mark.parametrize(("on_full", "carry"), [("partial", 4), ("requeue", 1), ("finish", 1)])
def test_a_run_of_one_epoch_leaves_no_group_open_and_fewer_prompts_than_a_batch_needs(on_full: str, carry: int) -> None:
    of = plain_collector(60, target_groups=4, gen_batch_size=12, surplus=Surplus(carry, on_full))
    epochs = Epochs(of, 1)
    flight: list[tuple[Request, int]] = []
    while not epochs.over:
        while not of.ready:
            flight += [(request, index) for request, index, _ in places(of.requests())]
            if not of.ready:
                request, index = flight.pop(0)
                of.observe(Rollout(request.uid, index, float(index), 5))
        of.take()
        gone = set(of.cancelled())
        flight = [one for one in flight if one[0].uid not in gone]
        for request, index in flight:
            of.observe(Paused(request.uid, index, 1) if on_full == "partial" else Rollout(request.uid, index, 0.0, 5))
        flight = flight if on_full == "partial" else []
    assert of.begun == 0
    assert (of.beliefs.visits <= 1).all()
    assert of.beliefs.visits.sum() + len(of.kept) > 60 - 4
