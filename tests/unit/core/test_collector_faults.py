"""The collector's faults and rejections: what fails is asked for again, what is refused is replaced."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

import pytest
from builders import answer, fill, plain_collector, rollout, source

from goldilocks import Collector, Failure, Limits, Rollout, Surplus
from goldilocks.core import Beliefs
from goldilocks.core.allocators import Adaptive, Allocator, Fixed, Sequential, Worth
from goldilocks.core.filters import Everything, Variance
from goldilocks.types import Group, Request


def collector(prompts: int = 100, **options: Any) -> Collector:
    return plain_collector(prompts, **{"filter": Variance(), **options})


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_failed_rollout_is_asked_for_again_up_to_the_limit() -> None:
    subject = collector(target_groups=1, limits=Limits(max_retries=1), filter=Everything())
    subject.requests()
    subject.observe(Failure("g0", 0, "engine_died", tokens=3))
    (retry,) = subject.requests()
    assert (retry.uid, retry.n, retry.first) == ("g0", 1, 2)
    subject.observe(Failure("g0", 2, "engine_died"))
    subject.observe(Rollout("g0", 1, 1.0, tokens=10))
    (group,) = subject.take()  # judged with the one it has
    assert group.rewards == [1.0]
    assert subject.accounts.rollouts["failed"] == 2
    assert subject.metrics()["train/rollout_failures/engine_died"] == 2


@pytest.mark.parametrize(("reward", "acc"), [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (1.0, math.nan)])
def test_a_reward_or_a_metric_that_is_not_finite_is_a_failure(reward: float, acc: float) -> None:
    subject = collector(target_groups=1)
    subject.requests()
    subject.observe(Rollout("g0", 0, reward, tokens=4, metrics={"acc": acc}))
    assert subject.accounts.tokens["failed"] == 4
    assert subject.metrics()["train/rollout_failures/non_finite_reward"] == 1


def test_a_rollout_without_the_metric_that_counts_passes_is_a_failure_whatever_the_filter() -> None:
    subject = plain_collector(beliefs=Beliefs(source(100).keys(), metric=None))
    subject.requests()
    subject.observe(Rollout("g0", 0, reward=0.7, tokens=4, metrics={"acc": math.nan}))
    assert subject.accounts.tokens["failed"] == 4


def test_a_metric_that_is_no_number_and_that_nothing_judges_by_is_dropped_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    subject = collector(target_groups=1)
    metrics = {"format": math.nan, "length": 2.0}
    fill(subject, lambda request, index: Rollout(request.uid, index, float(index), tokens=4, metrics=metrics))
    (group,) = subject.take()
    assert [rollout.metrics for rollout in group.rollouts] == [{"length": 2.0}] * 2
    assert subject.accounts.rollouts.get("failed", 0) == 0
    assert caplog.text.count("format=nan: dropped, as nothing judges by it") == 1


def test_a_group_whose_rollouts_all_fail_is_dropped() -> None:
    subject = collector(target_groups=1, limits=Limits(max_retries=0))
    subject.requests()
    for index in (0, 1):
        subject.observe(Failure("g0", index, "lost"))
    assert subject.metrics()["filter/dropped/failed"] == 1
    assert subject.requests()[0].uid == "g1"


def sequential_by_chunks() -> Sequential:
    """Return an allocator with a price at which it opens a group with one chunk, and goes on while rewards differ."""
    allocator = Sequential(n=12, chunk=2, worth_of=Worth.SIGNAL)
    allocator.load_state_dict({"earned": 6.0, "paid": 40.0, "given_up": 0})
    return allocator


def group_of(allocator: Allocator, fails: Container[int], rewards: Sequence[float] = (0.0,)) -> tuple[Group, int]:
    """Return a group of which the rollouts with these numbers fail, and how many it was asked for."""
    subject = collector(allocator=allocator, target_groups=1, limits=Limits(max_retries=0), filter=Everything())
    asked: list[int] = []

    def outcome(request: Request, index: int) -> Rollout | Failure:
        asked.append(index)
        return Failure("g0", index, "judge") if len(asked) in fails else rollout(request, index, rewards, tokens=1)

    fill(subject, outcome)
    (group,) = subject.take()
    return group, len(asked)


@pytest.mark.parametrize(
    ("allocator", "rewards"),
    [
        (Adaptive(max_n=12, rollouts_per_batch=1), (0.0,)),
        (Adaptive(max_n=12, rollouts_per_batch=2), (0.0,)),
        (Adaptive(max_n=12), (0.0,)),
        (sequential_by_chunks(), (0.0, 1.0)),
    ],
)
def test_rollouts_that_failed_for_good_take_their_places_of_a_group_and_do_not_end_it(
    allocator: Allocator, rewards: tuple[float, ...]
) -> None:
    group, asked = group_of(allocator, (3, 4), rewards)
    assert (len(group), asked) == (10, 12)


def test_a_group_that_lost_more_rollouts_than_it_has_ends() -> None:
    """A prompt whose answers cannot be graded would otherwise fail on and on, up to the most that a group can have."""
    group, asked = group_of(Adaptive(), range(3, 100))
    assert (len(group), asked) == (2, 2 + 8)


def test_a_duplicate_is_counted_and_not_trained_twice() -> None:
    subject = collector(allocator=Fixed(3), target_groups=1)
    subject.requests()
    for index in (0, 0, 1, 2):
        subject.observe(Rollout("g0", index, float(index == 0), tokens=10))
    (group,) = subject.take()
    assert [rollout.index for rollout in group.rollouts] == [0, 1, 2]
    assert subject.accounts.tokens["duplicate"] == 10


def test_an_unknown_uid_or_index_is_an_error_that_names_it() -> None:
    subject = collector()
    subject.requests()
    with pytest.raises(ValueError, match="uid='g99' is not accepted: a group that was requested"):
        subject.observe(Rollout("g99", 0, 1.0, 1))
    with pytest.raises(ValueError, match="uid='elephant' is not accepted"):
        subject.observe(Failure("elephant", 0, "lost"))
    with pytest.raises(ValueError, match="index=7 is not accepted: 0 to 1, which were requested of group g0"):
        subject.observe(Rollout("g0", 7, 1.0, 1))


# -- rejection ---------------------------------------------------------------------------------------------------------


def test_a_group_that_loses_its_signal_is_replaced_in_the_same_step() -> None:
    subject = collector(allocator=Fixed(3), gen_batch_size=3, surplus=Surplus(max_carry_steps=0))
    answer(subject, subject.requests(), rewards=(1.0, 0.0, 0.0))
    subject.take()
    assert subject.reject({"g0": [0]}, "gate1") == ("g0",)
    assert subject.ready  # the surplus serves before it expires
    assert [group.uid for group in subject.take()] == ["g2"]
    assert subject.step == 0


def test_a_group_none_of_whose_trained_rollouts_is_left_is_lost_whatever_its_others_say() -> None:
    """A gate sees the rows that are trained and no others: none of those takes the place of a refused one."""
    subject = collector(allocator=Adaptive(min_rollouts=6, max_n=6, max_train_n=2))
    answer(subject, subject.requests())
    trained = {group.uid: [rollout.index for rollout in group.trained] for group in subject.take()}
    assert trained == {"g0": [0, 1], "g1": [0, 1]}
    assert subject.reject({"g0": [0, 1], "g1": [0]}, "gate1") == ("g0",)
    assert subject.accounts.rollouts == {"open": 0, "carried": 0, "trained": 1, "trimmed": 4, "rejected/gate1": 7}
    assert (subject.owed, [group.uid for group in subject.in_hand]) == (1, ["g1"])


def test_a_kept_group_can_be_rejected_before_it_is_taken_and_one_that_is_not_there_is_an_error() -> None:
    subject = collector(gen_batch_size=3)
    answer(subject, subject.requests())
    assert subject.reject(["g1"], "stale") == ("g1",)
    assert [group.uid for group in subject.take()] == ["g0", "g2"]
    with pytest.raises(ValueError, match="uid='g5' is not accepted: a group that is in the batch in hand, or kept"):
        subject.reject(["g5"], "gate1")


def test_a_trimmed_rollout_is_not_trained_and_stays_in_its_group_which_cannot_be_trimmed_to_nothing() -> None:
    subject = collector(allocator=Fixed(3))
    answer(subject, subject.requests(), rewards=(1.0, 0.0, 0.0))
    subject.take()
    with pytest.raises(ValueError, match=r"indices=\[0, 1, 2\] is not accepted: fewer rollouts of group g0"):
        subject.trim({"g0": [0, 1, 2]})
    assert subject.accounts.tokens["trained"] == 60
    subject.trim({"g0": [2]})
    group = subject.in_hand[0]
    assert [rollout.index for rollout in group.trained] == [0, 1]
    assert group.rewards == [1.0, 0.0, 0.0]  # for the baseline
    assert (subject.owed, subject.accounts.tokens["trained"], subject.accounts.tokens["trimmed"]) == (0, 50, 10)
    subject.put_back()
    assert subject.accounts.tokens["carried"] == 60
    with pytest.raises(ValueError, match="uid='g0' is not accepted: a group of the batch in hand"):
        subject.trim({"g0": [1]})


def test_a_rejection_makes_the_next_refill_ask_for_more() -> None:
    subject = collector(target_groups=10)
    answer(subject, subject.requests())
    subject.take()
    subject.reject([f"g{index}" for index in range(10)], "gate1")
    assert len(subject.requests()) == 10  # no more than a generation batch is open at once
    assert subject.metrics()["train/keep_rate"] < 0.5


def test_what_was_in_flight_when_the_engine_died_does_not_count_against_the_limit() -> None:
    subject = collector(target_groups=1, limits=Limits(max_rollouts_per_step=2))
    (request,) = subject.requests()
    subject.reissue()
    assert subject.requests() == [request]  # the same rollouts, under the same indices


def test_only_what_was_lost_is_asked_for_again() -> None:
    subject = collector(target_groups=1, allocator=Fixed(5))
    subject.requests()
    for index in (1, 3):
        subject.observe(Rollout("g0", index, 1.0, tokens=1))
    subject.reissue()
    assert [(request.first, request.n) for request in subject.requests()] == [(0, 1), (2, 1), (4, 1)]


def test_what_is_left_in_hand_is_trained_when_nothing_can_be_had_for_what_was_rejected() -> None:
    subject = collector(limits=Limits(max_num_gen_batches=1, on_exhausted="shrink"))
    answer(subject, subject.requests())
    subject.take()
    subject.reject(["g0"], "gate1")
    assert subject.requests() == []
    assert subject.take() == ()
    assert [group.uid for group in subject.in_hand] == ["g1"]


def test_a_step_that_goes_on_after_a_rejection_reserves_tokens_for_what_it_cancelled_in_flight() -> None:
    bounds = Limits(max_tokens_per_step=700, max_tokens_per_rollout=100)
    options: dict[str, Any] = {"gen_batch_size": 6, "surplus": Surplus(on_full="requeue"), "filter": Everything()}
    subject = collector(allocator=Fixed(1), limits=bounds, **options)
    requests = subject.requests()
    answer(subject, requests[:2], tokens=90)
    subject.reject([subject.take()[0].uid], "gate")
    assert subject.cancelled() == ["g5", "g4", "g3", "g2"]
    more = subject.requests()
    assert sum(request.n for request in more) == 1, "180 tokens came, and 400 may come of those cancelled"
    answer(subject, requests[2:], tokens=100)
    assert subject.requests() == [], "those have come, and 100 may come of the one in flight"
    answer(subject, more, tokens=100)
    assert subject.accounts.generated_tokens == 680
    assert len(subject.take()) == 1
