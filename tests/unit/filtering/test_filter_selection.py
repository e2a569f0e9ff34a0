"""The four strategies: what each keeps of a group with too many samples."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goldilocks.filtering.rows import Segments
from goldilocks.filtering.selection import Draws, Samples, cut

STRATEGIES = ["uniform", "efficiency", "efficiency_stochastic", "max_variance"]


def keep(
    strategy: str, rewards: list[float], lengths: list[int], target: int, salt: int = 7, temperature: float = 0.25
) -> list[int]:
    """Indices kept of one group."""
    reward, length = torch.tensor(rewards, dtype=torch.float64), torch.tensor(lengths)
    groups = Segments.from_sorted(torch.zeros(len(rewards), dtype=torch.int64))
    draws = Draws.keyed_by_content(salt, reward, length, groups)
    return cut(strategy, Samples(groups, reward, length, draws.row), target, temperature).nonzero().squeeze(1).tolist()


def test_efficiency_takes_positives_by_reward_per_token_and_negatives_by_length_in_their_ratio() -> None:
    #            0    1    2    3  |  4   5   6   7
    rewards = [1.0, 1.0, 2.0, 1.0, 0.0, 0, 0, -1.0]
    assert keep("efficiency", rewards, [100, 10, 100, 900, 50, 5, 500, 40], 4) == [1, 2, 5, 7]
    rewards = [1.0] * 12 + [0.0] * 4
    assert sum(rewards[row] for row in keep("efficiency", rewards, list(range(1, 17)), 8)) == 6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_group_of_one_sign_is_cut_like_any_other(strategy: str) -> None:
    for reward in (1.0, 0.0):
        assert len(keep(strategy, [reward] * 6, [1, 2, 3, 4, 5, 6], 4)) == 4
    assert keep("efficiency", [0.0] * 6, [6, 5, 4, 3, 2, 1], 4) == [2, 3, 4, 5]


def test_one_sample_is_taken_from_the_more_frequent_sign() -> None:
    assert keep("efficiency", [1.0, 1.0, 0.0], [3, 2, 1], 1) == [1]
    assert keep("efficiency", [1.0, 0.0, 0.0], [3, 2, 1], 1) == [2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_group_no_larger_than_the_target_is_kept_whole(strategy: str) -> None:
    assert keep(strategy, [1.0, 0.0, 0.5], [1, 2, 3], 3) == [0, 1, 2]
    assert keep(strategy, [1.0, 0.0, 0.5], [1, 2, 3], 8) == [0, 1, 2]


def shares(strategy: str, rewards: list[float], lengths: list[int], target: int, temperature: float) -> torch.Tensor:
    """How often each sample of a group is kept, over many equal groups, which draw independently."""
    groups = 4000
    reward = torch.tensor(rewards, dtype=torch.float64).repeat(groups)
    length = torch.tensor(lengths).repeat(groups)
    segments = Segments.from_sorted(torch.arange(groups).repeat_interleave(len(rewards)))
    draws = Draws.keyed_by_content(3, reward, length, segments)
    kept = cut(strategy, Samples(segments, reward, length, draws.row), target, temperature)
    return kept.view(groups, -1).double().mean(0)


def test_uniform_keeps_every_sample_equally_often() -> None:
    kept = shares("uniform", [1.0, 0.0, 5.0, -1.0], [1, 1000, 10, 3], 2, 0.25)
    torch.testing.assert_close(kept, torch.full((4,), 0.5, dtype=torch.float64), atol=0.03, rtol=0)


def test_the_temperature_goes_from_greedy_to_uniform() -> None:
    rewards, lengths = [1.0] * 4 + [0.0] * 4, [1, 2, 3, 4] * 2
    cold, warm, hot = (shares("efficiency_stochastic", rewards, lengths, 4, t) for t in (1e-6, 0.25, 1e6))
    assert cold.tolist() == [1, 1, 0, 0] * 2
    torch.testing.assert_close(hot, torch.full_like(hot, 0.5), atol=0.03, rtol=0)
    assert warm[:4].tolist() == sorted(warm[:4].tolist(), reverse=True)
    assert warm[4:].tolist() == sorted(warm[4:].tolist(), reverse=True)
    assert 0.02 < warm[3] < 0.4 < 0.6 < warm[0] < 0.98


def test_the_first_draw_follows_the_weights() -> None:
    weights = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64).div(-0.5).exp()
    kept = shares("efficiency_stochastic", [1.0] * 4, [1, 2, 3, 4], 1, 0.5)
    torch.testing.assert_close(kept, weights / weights.sum(), atol=0.03, rtol=0)


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_no_scale_of_rewards_or_lengths_changes_the_odds(scale: float) -> None:
    rewards, lengths = [1.0, 2.0, 3.0, 0.0, 0.0, -1.0], [3, 1, 2, 4, 9, 2]
    plain = shares("efficiency_stochastic", rewards, lengths, 3, 0.25)
    scaled = shares("efficiency_stochastic", [r * scale for r in rewards], [n * 1000 for n in lengths], 3, 0.25)
    torch.testing.assert_close(plain, scaled, atol=0.04, rtol=0)


@settings(max_examples=60)
@given(
    st.lists(st.floats(-5, 5, allow_nan=False).map(lambda x: round(x, 2)), min_size=3, max_size=9),
    st.integers(2, 8),
)
def test_max_variance_finds_the_subset_of_largest_variance(rewards: list[float], target: int) -> None:
    target = min(target, len(rewards))

    def variance(rows: list[int] | tuple[int, ...]) -> float:
        return torch.tensor([rewards[row] for row in rows], dtype=torch.float64).var(correction=0).item()

    best = max(variance(rows) for rows in combinations(range(len(rewards)), target))
    assert variance(keep("max_variance", rewards, [1] * len(rewards), target)) == pytest.approx(best, abs=1e-4)


def test_max_variance_tells_rewards_apart_that_single_precision_does_not_and_prefers_the_even_split() -> None:
    assert keep("max_variance", [1e9 + 0.1 * row for row in (3, 1, 0, 2)], [1] * 4, 2) == [0, 2]
    rewards = [1.0] * 6 + [0.0] * 6
    assert sum(rewards[row] for row in keep("max_variance", rewards, [1] * 12, 4)) == 2
    too_large_for_the_fine_grid = [float(row % 7) for row in range(3000)]
    assert len(keep("max_variance", too_large_for_the_fine_grid, [1] * 3000, 2500)) == 2500


def test_what_is_drawn_does_not_depend_on_where_the_group_stands() -> None:
    reward, length = torch.rand(12, dtype=torch.float64), torch.arange(1, 13)
    first = Draws.keyed_by_content(5, reward, length, Segments.from_sorted(torch.tensor([0] * 4 + [1] * 8)))
    turned = torch.arange(12).roll(-4)
    second = Draws.keyed_by_content(
        5, reward[turned], length[turned], Segments.from_sorted(torch.tensor([0] * 8 + [1] * 4))
    )
    assert torch.equal(first.row[turned], second.row)
    assert torch.equal(first.group.flip(0), second.group)


def test_draws_look_uniform_and_groups_that_are_equal_draw_differently() -> None:
    groups = Segments.from_sorted(torch.arange(5000).repeat_interleave(4))
    draws = Draws.keyed_by_content(1, torch.ones(20_000, dtype=torch.float64), torch.ones(20_000).long(), groups)
    for numbers in (draws.row, draws.group):
        assert len(numbers.unique()) == len(numbers)
        assert (torch.histc(numbers, bins=10, min=0, max=1) / len(numbers) - 0.1).abs().max() < 0.015
    assert abs(torch.corrcoef(draws.row.view(-1, 4).T)[0, 1]) < 0.05
