"""The mean length of what was started is found though the longest answers were aborted."""

from __future__ import annotations

import random
import statistics

import pytest
from builders import fill, plain_collector
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.core.accounts import StartedLengths


def lengths(finished: list[int], aborted: list[int] = []) -> StartedLengths:  # noqa: B006  # never changed
    subject = StartedLengths()
    for tokens in finished:
        subject.add(tokens, finished=True)
    for tokens in aborted:
        subject.add(tokens, finished=False)
    return subject


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_without_aborts_it_is_the_mean(finished: list[int]) -> None:
    assert lengths(finished).mean == pytest.approx(statistics.fmean(finished))


def test_an_aborted_rollout_is_taken_to_end_as_those_that_went_on_did_also_after_a_restart() -> None:
    assert lengths([]).mean == 0
    subject, copy = lengths([10, 30, 50], aborted=[20]), StartedLengths()
    copy.load_state_dict(subject.state_dict())
    assert copy.mean == subject.mean == pytest.approx((10 + 30 + 50 + 40) / 4)


def test_rollouts_that_pause_and_go_on_leave_the_mean_where_it_is() -> None:
    """One step of a run in which everything is cut every 100 tokens: what goes on began in an earlier one."""
    rng = random.Random(1)
    true = [round(rng.lognormvariate(5, 0.6)) for _ in range(20_000)]
    subject = StartedLengths()
    for length in true:
        cuts = [*range(rng.randint(1, 100), length, 100)]
        for before, tokens in zip([0, *cuts], [*cuts, length], strict=True):
            subject.add(tokens, finished=tokens == length, before=before)
    assert subject.mean == pytest.approx(statistics.fmean(true), rel=0.01)


def test_a_step_that_carried_groups_fill_counts_one_generation_batch() -> None:
    collector = plain_collector(target_groups=2, gen_batch_size=4)
    for issued in (4, 0):
        fill(collector)
        collector.take()
        assert collector.metrics()["train/prompts_issued"] == issued
        assert collector.metrics()["train/num_gen_batches"] == 1
        collector.requests(0)  # the next step
