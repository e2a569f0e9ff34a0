"""The collector, one behaviour at a time."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
from builders import answer, fill, observe, plain_collector, reloaded, source

from goldilocks import Collector, Exhausted, Failure, Limits, ListSource, Rollout, Surplus
from goldilocks.core.allocators import Adaptive, Fixed, Sequential
from goldilocks.core.filters import Band, Everything, Length, Variance, build_filter
from goldilocks.core.selectors import Greso, Selector, Thompson, Uniform
from goldilocks.types import OnExhausted, Request


def collector(prompts: int = 100, **options: Any) -> Collector:
    return plain_collector(prompts, **{"filter": Variance(), **options})


def test_requests_exceed_neither_a_generation_batch_nor_the_room_and_go_on_where_they_stopped() -> None:
    subject = collector(target_groups=4, gen_batch_size=12)
    assert len(subject.requests()) == 12
    assert subject.requests() == []
    subject = collector(allocator=Fixed(4))
    assert [(request.n, request.first) for request in subject.requests(room=3)] == [(3, 0)]
    assert [(one.uid, one.n, one.first) for one in subject.requests(room=5)] == [("g0", 1, 3), ("g1", 4, 0)]


def test_surplus_is_carried_and_trained_first_and_expires_with_age() -> None:
    subject = collector(gen_batch_size=6, surplus=Surplus(max_carry_steps=1))
    answer(subject, subject.requests())
    assert [group.uid for group in subject.take()] == ["g0", "g1"]
    assert subject.requests() == []  # the next step begins with what was carried
    assert [group.uid for group in subject.take()] == ["g2", "g3"]
    subject.requests()  # g4 and g5 are two updates old
    assert not subject.ready
    assert subject.metrics()["train/groups_expired"] == 2
    assert subject.accounts.tokens["expired"] == 40


def test_graded_rewards_show_their_parts_their_spread_and_how_many_pass() -> None:
    def outcome(request: Request, index: int) -> Rollout:
        return Rollout(request.uid, index, (-1.0, 0.6)[index], 10, {"answer": index / 2})

    subject = collector(filter=Everything(), components=["answer", "format"])
    observe(subject, subject.requests(), outcome)
    metrics = subject.metrics()
    assert metrics["reward/answer"] == 0.25
    assert "reward/format" not in metrics  # no rollout has one: a function that returned None for every row
    assert metrics["difficulty/reward_std"] == pytest.approx(0.8)
    assert metrics["difficulty/pass_rate"] == 0.5
    subject.take()
    subject.requests()
    assert "reward/answer" not in subject.metrics()  # of the new step


def test_open_groups_finish_and_are_carried_when_the_batch_is_full() -> None:
    subject = collector(gen_batch_size=3)
    requests = subject.requests()
    answer(subject, requests[1:])
    subject.take()
    assert subject.cancelled() == []
    answer(subject, requests[:1])
    assert [group.uid for group in subject.kept] == ["g0"]


def test_requeued_groups_are_cancelled_and_their_prompts_come_first_again() -> None:
    subject = collector(gen_batch_size=3, surplus=Surplus(on_full="requeue"))
    requests = subject.requests()
    answer(subject, requests[1:])
    subject.observe(Rollout("g0", 0, 1.0, tokens=7))
    subject.take()
    assert subject.cancelled() == ["g0"]
    assert subject.accounts.tokens["cancelled"] == 7
    subject.observe(Rollout("g0", 1, 1.0, tokens=5))  # it was on its way already
    assert subject.accounts.tokens["cancelled"] == 12
    assert subject.requests()[0].prompt == requests[0].prompt


def test_a_chunk_is_waited_for_and_trained_whole() -> None:
    subject = collector(allocator=Adaptive(max_n=20, rollouts_per_batch=6), filter=Everything(), target_groups=1)
    answer(subject, subject.requests(), rewards=(0.0,))
    assert [request.n for request in subject.requests()] == [6]
    for index in (4, 5, 3, 2, 7):  # 4 is right, and short answers come first
        subject.observe(Rollout("g0", index, float(index == 4), tokens=10))
        assert (subject.ready, subject.requests()) == (False, [])
    subject.observe(Rollout("g0", 6, 0.0, tokens=90))
    (group,) = subject.take()
    assert [rollout.index for rollout in group.trained] == [*range(8)]
    assert subject.cancelled() == []
    assert "cancelled" not in subject.accounts.tokens


def test_a_failure_is_passed_over_and_asked_for_again_in_its_turn() -> None:
    subject = collector(allocator=Fixed(3), target_groups=1)
    subject.requests()
    subject.observe(Failure("g0", 1, "lost"))
    assert subject.requests() == []  # 0 has not arrived: nothing is decided out of turn
    subject.observe(Rollout("g0", 0, 1.0, tokens=1))
    (retry,) = subject.requests()
    assert (retry.n, retry.first) == (1, 3)
    answer(subject, [retry], rewards=(0.0,))
    subject.observe(Rollout("g0", 2, 1.0, tokens=1))
    (group,) = subject.take()
    assert [rollout.index for rollout in group.rollouts] == [0, 2, 3]


# -- the order of calls ------------------------------------------------------------------------------------------------


def test_looking_changes_nothing() -> None:
    subject = collector(gen_batch_size=6)
    answer(subject, subject.requests())
    subject.take()
    before = subject.state_dict()
    assert not subject.ready
    subject.metrics(), subject.kept, subject.in_hand, subject.alive, subject.waiting_rollouts, subject.owed
    assert str(subject.state_dict()) == str(before)
    assert subject.step == 0


def test_a_batch_is_taken_when_it_is_ready_and_once() -> None:
    subject = collector()
    with pytest.raises(ValueError, match="take: the batch is not ready, 0 of 2 groups are there"):
        subject.take()
    answer(subject, subject.requests())
    subject.take()
    with pytest.raises(ValueError, match="take: the batch is in hand already; requests begins the next step"):
        subject.take()


def test_a_saved_state_of_another_layout_is_refused() -> None:
    state = collector().state_dict()
    state["layout"] -= 1
    with pytest.raises(ValueError, match="layout=8 is not accepted: a state saved in layout 9; start the run anew"):
        collector().load_state_dict(state)


@pytest.mark.parametrize("now", [Thompson, Greso, Uniform])
def test_another_selector_or_allocator_or_filter_begins_afresh_and_the_run_goes_on(now: type[Selector]) -> None:
    before = Collector(source(9), Greso(p=0.2), Fixed(2), build_filter(["variance"]), target_groups=2)
    answer(before, before.requests())
    after = Collector(source(9), now(), Sequential(2), build_filter(["length", "variance"]), target_groups=2)
    after.load_state_dict(before.state_dict())
    assert [group.uid for group in after.take()] == ["g0", "g1"]
    assert getattr(after.selector, "p", 0.2) == 0.2  # of the same selector, what it knew
    assert set(after.selector.state_dict()) == set(now().state_dict())


def test_loading_a_state_forgets_what_happened_since() -> None:
    """A trainer that is told to fit again loads its last checkpoint into the collector it has."""
    subject = collector(gen_batch_size=4)
    requests = subject.requests()
    state = subject.state_dict()
    answer(subject, requests)
    subject.take()
    subject.load_state_dict(state)
    assert str(subject.state_dict()) == str(state)
    answer(subject, requests)
    assert [group.uid for group in subject.take()] == ["g0", "g1"]


def test_limits_reached_is_an_error_in_the_documented_words_and_loses_nothing() -> None:
    subject = collector(limits=Limits(max_num_gen_batches=2))
    answer(subject, subject.requests(), rewards=(1.0, 1.0))
    answer(subject, subject.requests(), rewards=(0.0, 0.0))
    with pytest.raises(
        ValueError,
        match=r"num_gen_batches=2 >= max_num_gen_batches=2\. "
        r"Generated too many batches\. Please check if your data are too difficult\.",
    ):
        subject.requests()
    assert not subject.ready
    subject.accounts.check()
    assert subject.accounts.tokens == {"open": 0, "filtered/too_easy": 40, "filtered/too_hard": 40}


def test_shrink_trains_on_what_is_there_and_to_nothing_is_an_error() -> None:
    some, none = (collector(limits=Limits(max_num_gen_batches=1, on_exhausted="shrink")) for _ in range(2))
    requests = some.requests()
    answer(some, requests[:1])
    answer(some, requests[1:], rewards=(0.0, 0.0))
    assert not some.ready
    assert some.requests() == []
    assert [group.uid for group in some.take()] == ["g0"]
    answer(none, none.requests(), rewards=(0.0, 0.0))
    none.requests()
    with pytest.raises(Exhausted, match="Generated too many batches"):
        none.take()


def test_backfill_keeps_the_shape_with_dropped_groups() -> None:
    subject = collector(limits=Limits(max_num_gen_batches=1, on_exhausted="backfill"))
    requests = subject.requests()
    answer(subject, requests[:1], rewards=(0.0, 0.0))
    answer(subject, requests[1:])
    subject.requests()
    assert [group.uid for group in subject.take()] == ["g1", "g0"]
    assert subject.accounts.rollouts["backfilled"] == 2
    assert subject.metrics()["train/groups_backfilled"] == 1


@pytest.mark.parametrize("flat", [True, False])
def test_only_groups_rejected_for_want_of_a_gradient_fill_a_batch_up(flat: bool) -> None:
    subject = collector(filter=Everything(), limits=Limits(max_num_gen_batches=1, on_exhausted="backfill"))
    answer(subject, subject.requests())
    subject.take()
    assert subject.reject(["g0"], "gate", flat=flat) == ("g0",)
    subject.requests()
    assert [group.uid for group in subject.take()] == (["g0"] if flat else [])
    assert subject.backfilled == ({"g0"} if flat else set())
    assert subject.alive == ({"g0", "g1"} if flat else {"g1"})
    subject.accounts.check()


def test_a_group_whose_first_ask_the_budget_cannot_pay_is_not_opened_and_one_it_starves_judged_by_what_it_has() -> None:
    subject = collector(allocator=Fixed(4), limits=Limits(max_rollouts_per_step=6, on_exhausted="shrink"))
    assert [request.n for request in subject.requests()] == [4]
    bounds = Limits(max_rollouts_per_step=4, on_exhausted="shrink")
    subject = collector(
        allocator=Adaptive(max_n=8, rollouts_per_batch=4), filter=Everything(), target_groups=1, limits=bounds
    )
    answer(subject, subject.requests(), rewards=(0.0,))
    answer(subject, subject.requests(), rewards=(0.0,))  # two of the four it wants
    assert subject.requests() == []
    (group,) = subject.take()
    assert len(group) == 4


def test_tokens_are_reserved_before_they_are_written_and_a_budget_too_small_for_a_group_is_said() -> None:
    subject = collector(limits=Limits(max_tokens_per_step=100, max_tokens_per_rollout=60))
    with pytest.raises(Exhausted, match=r"goldilocks.max_tokens_per_step=100 \(60 reserved for each rollout\)"):
        subject.requests()
    bounds = Limits(max_tokens_per_step=100, max_tokens_per_rollout=30, on_exhausted="shrink")
    subject = collector(filter=Everything(), target_groups=5, limits=bounds)
    assert [request.n for request in subject.requests()] == [2]  # four could be 120 tokens
    subject.observe(Rollout("g0", 0, 1.0, tokens=5))
    subject.observe(Rollout("g0", 1, 1.0, tokens=5))
    assert [request.n for request in subject.requests()] == [2]


def test_a_refill_has_two_standard_deviations_to_spare_where_surplus_is_carried() -> None:
    def refill(surplus: Surplus) -> int:
        subject = collector(1000, target_groups=50, gen_batch_size=100, surplus=surplus)
        requests = subject.requests()
        answer(subject, requests[:60], rewards=(1.0, 1.0))  # dropped
        answer(subject, requests[60:])
        return len(subject.requests())

    rate = (40 + 4 * 0.5) / 104
    assert refill(Surplus(max_carry_steps=0)) == math.ceil(10 / rate)
    spared = refill(Surplus(max_carry_steps=1))
    assert spared * rate - 2 * math.sqrt(spared * rate * (1 - rate)) >= 10
    assert (spared - 1) * rate - 2 * math.sqrt((spared - 1) * rate * (1 - rate)) < 10


# -- metrics and state -------------------------------------------------------------------------------------------------


def test_metrics_have_the_documented_names() -> None:
    subject = collector(gen_batch_size=4, target_groups=2)
    requests = subject.requests()
    answer(subject, requests[:1], rewards=(1.0, 1.0), tokens=2)
    answer(subject, requests[1:2], rewards=(0.0, 0.0))
    answer(subject, requests[2:])
    metrics = subject.metrics()
    assert metrics["train/num_gen_batches"] == 1
    assert metrics["train/filtered_prompts_ratio"] == 0.5
    assert metrics["filter/dropped/too_easy"] == metrics["filter/dropped/too_hard"] == 1
    assert metrics["length/generated_mean"] == 8
    assert metrics["length/kept_mean"] == 10
    expected = {
        "iterations": 1,
        "total_rollouts": 8,
        "avg_rollouts_per_sample": 2,
        "min_rollouts_per_sample": 2,
        "max_rollouts_per_sample": 2,
        "samples_with_positive": 3,
        "samples_without_positive": 1,
        "positive_rate": 0.75,
        "efficiency": 0.5,
        "informative_groups_per_1k_rollouts": 250,
    }
    assert {name: metrics[f"adaptive_rollout/{name}"] for name in expected} == expected


def test_everything_that_was_generated_counts_as_rollouts_of_the_step() -> None:
    subject = collector(target_groups=1, surplus=Surplus(on_full="requeue"), gen_batch_size=2)
    first, _ = subject.requests()
    subject.observe(Failure("g0", 0, "judge"))
    subject.observe(Rollout("g0", 1, 1.0, 10))
    (again,) = subject.requests()
    subject.observe(Rollout("g0", again.first, 0.0, 10))
    subject.take()
    for uid in subject.cancelled():  # g1, of which nothing had come
        for index in range(first.n):
            subject.observe(Failure(uid, index, "cancelled"))
    metrics = subject.metrics()
    assert metrics["adaptive_rollout/total_rollouts"] == subject.accounts.generated_rollouts == 5
    assert metrics["adaptive_rollout/efficiency"] == 1 / 5


def test_a_reordered_data_set_finds_its_groups_and_beliefs_again() -> None:
    names = [f"prompt {index}" for index in range(20)]
    before = Collector(ListSource(names), Uniform(), Fixed(2), Variance(), target_groups=2, gen_batch_size=6)
    requests = before.requests()
    answer(before, requests[:3])
    after = Collector(ListSource(names[::-1]), Uniform(), Fixed(2), Variance(), target_groups=2, gen_batch_size=6)
    after.load_state_dict(before.state_dict())
    assert [g.prompt.payload for g in after.kept] == [request.prompt.payload for request in requests[:3]]
    visited = {names[::-1][index] for index in after.beliefs.visits.nonzero()[0]}
    assert visited == {request.prompt.payload for request in requests[:3]}


@pytest.mark.parametrize("there", [range(20)[::-1], range(19, 7, -1), range(28)], ids=["moved", "fewer", "more"])
def test_without_repeats_other_data_are_visited_once_each(there: range) -> None:
    names = [f"prompt {index}" for index in range(20)]
    before = Collector(ListSource(names), Uniform(), Fixed(2), Everything(), target_groups=4, repeat=False)
    seen = before.requests()
    answer(before, seen)
    before.take()
    now = [f"prompt {index}" for index in there]
    after = Collector(ListSource(now), Uniform(), Fixed(2), Everything(), target_groups=4, repeat=False)
    after.load_state_dict(before.state_dict())
    again: list[str] = []
    with contextlib.suppress(Exhausted):
        while len(again) < 100:
            requests = after.requests()
            answer(after, requests)
            again += [request.prompt.payload for request in requests]
            if after.ready:
                after.take()
    assert sorted(again) == sorted({*now} - {request.prompt.payload for request in seen})


def test_an_explored_prompt_is_known_again_in_reordered_data() -> None:
    names = [f"prompt {index}" for index in range(8)]
    before, after = (
        Collector(ListSource(one), Thompson(explore=1.0), Fixed(2), Everything(), target_groups=4)
        for one in (names, names[::-1])
    )
    before.requests()
    after.load_state_dict(before.state_dict())
    after.reissue()
    answer(after, after.requests())
    assert after.metrics()["selector/explored_groups"] == 4


# -- the number of a visit, by which its noise is seeded -------------------------------------------------------------


def visits(requests: list[Any]) -> list[tuple[Any, int]]:
    return [(request.prompt.payload, request.visit) for request in requests]


def test_numbers_of_visits_are_saved_and_find_their_prompts_in_reordered_data() -> None:
    names = [f"prompt {index}" for index in range(3)]
    before = Collector(ListSource(names), Uniform(), Fixed(2), Everything(), target_groups=4)
    asked = before.requests()
    answer(before, asked[:2])
    after = Collector(ListSource(names[::-1]), Uniform(), Fixed(2), Everything(), target_groups=4)
    after.load_state_dict(before.state_dict())
    after.reissue()
    again = after.requests()
    assert visits(again) == visits(asked[2:])
    answer(after, again)
    after.take()
    numbers = {name: sum(one.prompt.payload == name for one in asked) for name in names}
    for name, visit in visits(after.requests()):
        assert visit == numbers[name]
        numbers[name] += 1


def test_a_prompt_in_hand_that_is_gone_from_the_data_is_named() -> None:
    before = collector(5)
    before.requests()
    with pytest.raises(ValueError, match="group g0 of the saved state is about a prompt"):
        Collector(ListSource(["other"]), Uniform(), Fixed(2), Variance(), target_groups=1).load_state_dict(
            before.state_dict()
        )


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"prompts": 0}, "source='0 prompts' is not accepted"),
        ({"target_groups": 0}, "target_groups=0 is not accepted: 1 or more"),
        ({"gen_batch_size": 0}, "gen_batch_size=0 is not accepted"),
        ({"prompts": 3, "target_groups": 4, "repeat": False}, r"target_groups .*=4 is not accepted: at most 3"),
    ],
)
def test_bounds_that_cannot_be_met_are_refused(bounds: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collector(**bounds)


def test_a_batch_of_more_groups_than_prompts_is_refused_where_no_prompt_is_chosen_while_it_is_in_hand() -> None:
    """Where one prompt is always right, its groups would be dropped for ever while those of the others wait."""
    with pytest.raises(ValueError, match=r"target_groups .*=4 is not accepted: at most 3: none is in it twice"):
        Collector(source(3), Thompson(), Fixed(2), Variance(), target_groups=4)


@pytest.mark.parametrize("cut", [False, True])
def test_what_replaces_rejected_groups_is_of_no_prompt_of_the_batch(cut: bool, tmp_path: Path) -> None:
    def make() -> Collector:
        return Collector(source(8), Thompson(), Fixed(2), Everything(), target_groups=6, seed=5)

    subject = make()
    for _ in range(5):
        fill(subject)
        subject.reject([group.uid for group in subject.take()[:3]], "gate")
        subject = reloaded(subject, make(), tmp_path / "state.npz") if cut else subject
        fill(subject)
        subject.take()
        assert len({group.prompt.index for group in subject.in_hand}) == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Limits(on_exhausted="panic"), "on_exhausted='panic' is not accepted: one of error, shrink, backfill"),
        (lambda: Limits(max_tokens_per_step=9), "max_tokens_per_rollout=None is not accepted"),
        (lambda: Limits(max_rollouts_per_step=0), "goldilocks.max_rollouts_per_step=0 is not accepted"),
        (lambda: Limits(max_retries=-1), "goldilocks.max_retries=-1 is not accepted"),
        (lambda: Surplus(max_carry_steps=-1), "algorithm.filter_groups.max_carry_steps=-1 is not accepted"),
        (lambda: Surplus(on_full="wait"), "on_full='wait' is not accepted: one of finish, requeue, partial"),
    ],
)
def test_limits_that_make_no_sense_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_without_repeats_the_data_end_and_the_error_says_so() -> None:
    subject = collector(3, repeat=False)
    answer(subject, subject.requests(), rewards=(1.0, 1.0))
    answer(subject, subject.requests(), rewards=(1.0, 1.0))
    with pytest.raises(Exhausted, match=r"0 of 2 groups are kept and no more can be had: .* 3 visits to 3 prompts"):
        subject.requests()


def test_after_a_restart_the_limits_of_today_hold() -> None:
    subject = collector(limits=Limits(max_num_gen_batches=1))
    answer(subject, subject.requests(), rewards=(1.0, 1.0))
    with pytest.raises(Exhausted):
        subject.requests()
    more = collector(limits=Limits(max_num_gen_batches=2))
    more.load_state_dict(subject.state_dict())
    assert len(more.requests()) == 2


def test_batches_of_an_update_that_was_not_made_wait_again_and_teach_the_beliefs_once() -> None:
    subject = collector(gen_batch_size=4)
    answer(subject, subject.requests())
    first = subject.take()
    subject.extend()
    answer(subject, subject.requests())
    subject.take()
    subject.put_back()
    subject.accounts.check()
    assert subject.accounts.rollouts["trained"] == 0
    assert subject.take() == first
    subject.requests()  # the next step
    assert subject.beliefs.moves.sum() == len(first)


def test_a_batch_that_was_not_trained_waits_again() -> None:
    subject = collector(gen_batch_size=3)
    answer(subject, subject.requests())
    subject.take()
    subject.reject(["g0"], "gate1")
    subject.put_back()
    subject.accounts.check()
    assert [group.uid for group in subject.take()] == ["g1", "g2"]


@pytest.mark.parametrize(
    ("filter", "outcome"),
    [
        (Variance("acc"), lambda uid, index: Rollout(uid, index, -0.1 * index, 5, metrics={"acc": 0.0})),
        (Band(lo=0.2, hi=0.8), lambda uid, index: Rollout(uid, index, float(index == 0), 5)),
        (Length(), lambda uid, index: Rollout(uid, index, float(index < 4), 5, truncated=True)),
    ],
    ids=["shaped reward", "band", "length"],
)
def test_no_dropped_group_whose_rewards_differ_fills_a_batch_up(filter: Any, outcome: Any) -> None:
    bounds = Limits(max_num_gen_batches=1, on_exhausted=OnExhausted.BACKFILL)
    subject = collector(allocator=Fixed(8), filter=filter, limits=bounds)
    observe(subject, subject.requests(), lambda request, index: outcome(request.uid, index))
    assert subject.requests() == []
    with pytest.raises(Exhausted):
        subject.take()
    assert subject.backfilled == set()
