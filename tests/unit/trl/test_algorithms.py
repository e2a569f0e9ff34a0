"""Advantages for groups of any size are TRL's where TRL has them: groups of one size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.trl.algorithms import EPSILON, advantages, leave_one_out

rewards = st.floats(-5, 5, width=32, allow_subnormal=False)


@given(st.lists(st.lists(rewards, min_size=2, max_size=7), min_size=1, max_size=5))
def test_a_groups_advantages_have_mean_zero_and_its_own_scale(groups: list[list[float]]) -> None:
    found = advantages([torch.tensor(one)[:, None] for one in groups], torch.ones(1), "group", "sum_then_normalize")
    for values, own in zip(found, groups, strict=True):
        spread = torch.tensor(own).std()
        # The mean of floats is off by a rounding, which counts for more the less they differ: as in TRL.
        rounding = 8 * torch.finfo(torch.float32).eps * torch.tensor(own).abs().max()
        assert abs(values.mean()) <= rounding / (spread + EPSILON) + 1e-6
        expected = (torch.tensor(own) - torch.tensor(own).mean()) / (spread + EPSILON)
        torch.testing.assert_close(values, expected, atol=1e-3, rtol=1e-3)


def test_without_scale_only_the_mean_is_taken_off_and_with_the_batchs_all_have_one() -> None:
    groups = [torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [1.0], [4.0]])]
    plain = advantages(groups, torch.ones(1), "none", "sum_then_normalize")
    assert [one.tolist() for one in plain] == [[-1, 1], [-1, -1, 2]]
    scaled = advantages(groups, torch.ones(1), "batch", "sum_then_normalize")
    spread = torch.cat(groups).std() + EPSILON
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(other, one / spread)


def test_a_function_that_does_not_apply_counts_for_nothing() -> None:
    group = torch.tensor([[1.0, math.nan], [0.0, 1.0]])
    (found,) = advantages([group], torch.tensor([1.0, 3.0]), "none", "sum_then_normalize")
    assert found.tolist() == [-1, 1]


def test_a_group_of_one_and_a_group_of_equals_teach_nothing() -> None:
    found = advantages([torch.ones(1, 1), torch.ones(3, 1)], torch.ones(1), "group", "sum_then_normalize")
    assert [one.tolist() for one in found] == [[0.0], [0.0, 0.0, 0.0]]


def test_each_function_is_normalized_before_they_are_added_up() -> None:
    """A function with a hundred times the scale weighs as much as the other."""
    small = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 100.0], [1.0, 100.0]])
    (found,) = advantages([small], torch.ones(2), "group", "normalize_then_sum")
    assert float(found[1]) == pytest.approx(float(found[2]), abs=1e-3)
    assert float(found[3]) == pytest.approx(-float(found[0]), abs=1e-3)


def test_each_score_is_compared_with_the_mean_of_the_others_to_which_a_reward_function_applies() -> None:
    found = leave_one_out([torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2.0, 4.0])], normalize=False)
    assert found[0].tolist() == pytest.approx([1.0, -0.5, -0.5])
    assert found[1].tolist() == pytest.approx([-2.0, 2.0])
    found = leave_one_out([torch.tensor([1.0, torch.nan, 0.0]), torch.tensor([torch.nan, 3.0])], normalize=False)
    assert found[0].tolist() == pytest.approx([1.0, 0.0, -1.0])
    assert found[1].tolist() == [0.0, 0.0]


def test_normalized_advantages_are_of_one_batch() -> None:
    groups = [torch.tensor([1.0, 0.0]), torch.tensor([5.0, 1.0, 3.0])]
    plain = torch.cat(leave_one_out(groups, normalize=False))
    expected = (plain - plain.mean()) / (plain.std() + 1e-4)
    assert torch.allclose(torch.cat(leave_one_out(groups, normalize=True)), expected)
