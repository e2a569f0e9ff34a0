"""RLOO's advantages, for groups of any size, beside TRL's formula for groups of one size."""

from __future__ import annotations

import pytest
import torch

from goldilocks.trl.advantages import leave_one_out


def test_each_score_is_compared_with_the_mean_of_the_others() -> None:
    found = leave_one_out([torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2.0, 4.0])], normalize=False)
    assert found[0].tolist() == pytest.approx([1.0, -0.5, -0.5])
    assert found[1].tolist() == pytest.approx([-2.0, 2.0])


def test_a_rollout_that_no_reward_function_applies_to_has_no_part() -> None:
    found = leave_one_out([torch.tensor([1.0, torch.nan, 0.0]), torch.tensor([torch.nan, 3.0])], normalize=False)
    assert found[0].tolist() == pytest.approx([1.0, 0.0, -1.0])
    assert found[1].tolist() == [0.0, 0.0]


def test_normalized_advantages_are_of_one_batch() -> None:
    groups = [torch.tensor([1.0, 0.0]), torch.tensor([5.0, 1.0, 3.0])]
    plain = torch.cat(leave_one_out(groups, normalize=False))
    expected = (plain - plain.mean()) / (plain.std() + 1e-4)
    assert torch.allclose(torch.cat(leave_one_out(groups, normalize=True)), expected)
