"""The guard of an update on rollouts of an older policy."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from goldilocks.algorithms.behaviour import UpdateGuard, kept_tokens, pushed_tokens

ROUNDING = 1e-9


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Log-ratios, advantages and a mask, [rows, tokens]."""
    rows, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    size = rows * tokens

    def numbers(values: st.SearchStrategy[float]) -> Tensor:
        drawn = draw(st.lists(values, min_size=size, max_size=size))
        return torch.tensor(drawn, dtype=torch.float64).view(rows, tokens)

    ratios = numbers(st.floats(-3, 3))
    advantages = numbers(st.sampled_from([-2.0, -0.5, 0.0, 1.0]))
    return ratios, advantages, numbers(st.sampled_from([0.0, 1.0, 1.0])).bool()


BOUNDS = st.sampled_from([0.01, 0.04, 0.3, 2.0])


def mean_distance(log_ratio: Tensor, tokens: Tensor) -> float:
    return float(log_ratio[tokens].square().mean()) if tokens.any() else 0.0


@given(batches(), BOUNDS)
def test_what_is_kept_is_within_the_bound_and_only_pushed_tokens_are_masked(
    batch: tuple[Tensor, Tensor, Tensor], bound: float
) -> None:
    log_ratio, _, _ = batch
    kept, pushed = kept_tokens(*batch, bound), pushed_tokens(*batch)
    assert mean_distance(log_ratio, kept & pushed) <= bound + ROUNDING
    assert bool((kept | pushed).all())


@given(batches(), BOUNDS)
def test_one_token_more_would_be_beyond_the_bound(batch: tuple[Tensor, Tensor, Tensor], bound: float) -> None:
    """Of the masked tokens the nearest; those at the same distance are masked with it."""
    log_ratio, _, _ = batch
    kept, pushed = kept_tokens(*batch, bound), pushed_tokens(*batch)
    if bool(kept.all()):
        return
    squares = log_ratio.square()
    nearest = squares[~kept].min()
    assert bool((squares[kept & pushed] < nearest).all())
    with_nearest = kept | (squares == nearest)
    assert mean_distance(log_ratio, with_nearest & pushed) > bound - ROUNDING


@given(batches(), BOUNDS, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(batch: tuple[Tensor, Tensor, Tensor], bound: float, random: object) -> None:
    order = list(range(len(batch[0])))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = kept_tokens(*(one[order] for one in batch), bound)  # type: ignore[misc]
    assert torch.equal(shuffled, kept_tokens(*batch, bound)[order])


@given(batches(), BOUNDS, st.integers(0, 5))
def test_micro_batches_keep_the_mini_batch_within_the_bound_and_do_not_change_the_verdict(
    batch: tuple[Tensor, Tensor, Tensor], bound: float, at: int
) -> None:
    log_ratio, advantages, mask = batch
    whole, parted = UpdateGuard(bound, skip=0.4), UpdateGuard(bound, skip=0.4)
    whole.guarded(log_ratio, torch.zeros_like(log_ratio), advantages, mask)
    parts = [tuple(one[rows] for one in batch) for rows in (slice(at), slice(at, None))]
    left = [parted.guarded(part[0], torch.zeros_like(part[0]), *part[1:]) for part in parts if len(part[0])]
    assert mean_distance(log_ratio, (torch.cat(left) != 0) & pushed_tokens(*batch)) <= bound + ROUNDING
    one, other = whole.verdict(lambda sums: sums), parted.verdict(lambda sums: sums)
    assert one.metrics["replay/m2"] == pytest.approx(other.metrics["replay/m2"])
    assert one.skip == other.skip


@given(batches(), BOUNDS)
def test_nothing_is_masked_where_the_policy_wrote_the_tokens(
    batch: tuple[Tensor, Tensor, Tensor], bound: float
) -> None:
    log_probs, advantages, mask = batch
    guard = UpdateGuard(bound, skip=1e-6)
    for behaviour in (log_probs, torch.full_like(log_probs, math.nan)):
        assert torch.equal(guard.guarded(log_probs, behaviour, advantages, mask), advantages)
    verdict = guard.verdict(lambda sums: sums)
    assert not verdict.skip
    assert set(verdict.metrics.values()) == {0.0}


def test_the_furthest_tokens_that_would_be_pushed_further_are_masked() -> None:
    log_ratio = torch.tensor([[0.1, 0.5, 2.0], [-0.1, -0.4, 1.0], [0.0, 0.3, -3.0]])
    advantages = torch.tensor([[1.0], [-1.0], [1.0]]).expand(3, 3)
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[0, 2] = False
    # Pushed: 0.1² 0.5² | 0.1² 0.4² | 0.3²; means of the smallest: 0.01, 0.01, 0.037, 0.0675, 0.104.
    kept = kept_tokens(log_ratio, advantages, mask, bound=0.04)
    assert kept.tolist() == [[True, False, True], [True, False, True], [True, True, True]]
    assert bool(kept_tokens(log_ratio, advantages, mask, bound=0.11).all())


def test_the_verdict_is_by_the_whole_mini_batch() -> None:
    """Two micro-batches: distances 1, 1 and 0.01, 0.01, 0 with advantages, and one far token without."""
    guard = UpdateGuard(bound=0.04, skip=0.4)
    old = torch.zeros(1, 2)
    first = guard.guarded(torch.tensor([[1.0, -1.0]]), old, torch.tensor([[1.0]]), torch.ones(1, 2))
    assert first.tolist() == [[0.0, 1.0]]
    log_probs = torch.tensor([[0.1, -0.1, 0.0], [9.0, 9.0, 9.0]])
    second = guard.guarded(log_probs, torch.zeros(2, 3), torch.tensor([[1.0], [0.0]]), torch.ones(2, 3))
    assert second.tolist() == [[1.0] * 3, [0.0] * 3]
    verdict = guard.verdict(lambda sums: sums)
    assert verdict.skip
    moment = verdict.metrics.pop("replay/m2")
    assert moment == pytest.approx(2.02 / 5)
    assert verdict.metrics == {
        "replay/guarded_rows": 1,
        "replay/guarded_tokens": 1,
        "replay/skipped_updates": 1,
    }
    assert not guard.verdict(lambda sums: sums).skip, "the next mini-batch begins anew"


def test_processes_share_one_verdict() -> None:
    """One process is far from the policy that wrote its tokens, three are not: in the mean the bound holds."""
    guard = UpdateGuard(bound=0.04, skip=0.5)
    guard.guarded(torch.ones(1, 2), torch.zeros(1, 2), torch.tensor([[1.0]]), torch.ones(1, 2))
    others = torch.tensor([0.0, 6.0, 0.0, 0.0], dtype=torch.float64)
    assert guard.verdict(lambda sums: sums + others).metrics["replay/m2"] == pytest.approx(0.25)


def test_a_log_prob_that_is_not_a_number_is_beyond_any_bound() -> None:
    guard = UpdateGuard(bound=0.04, skip=1e9)
    guard.guarded(torch.tensor([[math.nan]]), torch.zeros(1, 1), torch.tensor([[1.0]]), torch.ones(1, 1))
    assert guard.verdict(lambda sums: sums).skip
