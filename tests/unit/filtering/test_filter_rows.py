"""A batch and what replaced its rejected rows are described together, as if they had been judged in one call."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.filtering import PPOBatchFilter
from goldilocks.filtering.batch_filter import Metrics
from goldilocks.runs.history import Mean, combine

GROUP = 4
CONFIG = {
    "target_group_size": GROUP,
    "reward_threshold": -0.5,
    "max_response_length": 8,
    "enable_two_gate_filter": True,
    "gate_always": True,
}


def judge(groups: list[tuple[int, int]]) -> Metrics:
    """Groups of four rows: how many are right, and a seed of lengths and log-probs."""
    generators = [torch.Generator().manual_seed(seed) for _, seed in groups]
    lengths = torch.cat([torch.randint(1, 9, (GROUP,), generator=one) for one in generators])
    rewards = torch.cat([(torch.arange(GROUP) < right).float() for right, _ in groups])
    log_probs = torch.cat([-torch.rand(3, GROUP, 8, generator=one) for one in generators], dim=1)
    batch = {"rewards": rewards, "response_mask": (torch.arange(8)[None] < lengths[:, None]).long()}
    batch |= dict(zip(("old_log_probs", "rollout_log_probs", "top_log_probs"), log_probs, strict=True))
    uids = [f"g{place}" for place in range(len(groups)) for _ in range(GROUP)]
    return PPOBatchFilter(CONFIG).filter_batch(batch, uids, return_indices=True)[1]


GROUPS = st.lists(st.tuples(st.integers(0, GROUP), st.integers(0, 99)), min_size=1, max_size=5)


OF_THE_BATCH = ("batch/low_batch_size_warning", "batch/critical_empty_batch")  # they follow from the whole


@given(st.lists(GROUPS, min_size=1, max_size=4))
def test_judged_in_several_calls_the_metrics_are_those_of_one(calls: list[list[tuple[int, int]]]) -> None:
    apart = combine(judge(groups) for groups in calls)
    together = judge([group for groups in calls for group in groups])
    for name in OF_THE_BATCH:
        apart[name] = together[name]
    assert apart == pytest.approx(together, abs=1e-6)


def test_counts_are_summed_and_means_are_weighed() -> None:
    steps = [{"dropped": 2, "rate": Mean(1, 2)}, {"dropped": 3, "rate": Mean(0, 6)}, {"dropped": 1}]
    assert combine(steps) == {"dropped": 6, "rate": 1 / 8}
    assert combine([{}, {}]) == {}


@pytest.mark.parametrize("mean", [Mean(1.0, 3), Mean(0.1 * 7, 7), Mean(0.0, 0)])
def test_a_mean_is_the_same_in_another_process(mean: Mean) -> None:
    there = pickle.loads(pickle.dumps(mean))
    assert isinstance(there, Mean)
    assert (float(there), there.count) == (float(mean), mean.count)
