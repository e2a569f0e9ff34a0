"""The guard for old weights, on gaps that are made up."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.losses.log_probs import FP32, GROWTH, HALF, StaleWeights, WeightsGuard, gap_sums, mean_gap

CPU = torch.device("cpu")

METRIC = "rollout/weights_gap"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_two_updates_in_a_row_beyond_the_limit_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = WeightsGuard("warn", exact=True)
    for gap in (1e-6, 0.3, 1e-6, 0.3):
        assert guard.observe(gap) == {METRIC: gap}
    assert warnings(caplog) == []
    for gap in (0.4, 0.5, 0.5):
        assert guard.observe(gap) == {METRIC: gap}
    (message,) = warnings(caplog)
    assert "rollout/weights_gap is 0.3 and 0.4 in 2 updates in a row, where the precision explains 0.001: " in message
    assert "trainer and rollout engine have different log-probs for the same tokens. It was 1e-06 before" in message
    assert "It was 1e-06 before, so most likely the engine has older weights" in message
    assert "goldilocks.on_stale_weights=error" in message


def test_a_run_that_asked_for_it_ends() -> None:
    guard = WeightsGuard("error", exact=False)
    guard.observe(0.5)
    with pytest.raises(StaleWeights, match=r"0\.5 and 0\.6 .* from the start, .* another model, precision or adapter"):
        guard.observe(0.6)


def test_an_update_without_a_fresh_row_says_nothing_and_is_not_counted() -> None:
    guard = WeightsGuard("error", exact=True)
    guard.observe(0.5)
    assert guard.observe(None) == {}
    with pytest.raises(StaleWeights):
        guard.observe(math.nan)


def test_where_something_else_explains_a_gap_it_is_a_metric_only(caplog: pytest.LogCaptureFixture) -> None:
    guard = WeightsGuard("error", exact=True, judges=False)
    (said,) = warnings(caplog)
    assert said.startswith("goldilocks.on_stale_weights=error has no effect")
    assert [guard.observe(0.5) for _ in range(3)] == [{METRIC: 0.5}] * 3
    assert warnings(caplog) == [said]


@given(st.floats(1e-4, 0.049), st.lists(st.floats(1.0, GROWTH), max_size=20))
def test_rounding_in_half_precision_is_none_of_its_business(noise: float, growth: list[float]) -> None:
    """An engine whose kernels round otherwise than the trainer's, from the first update to the last."""
    guard = WeightsGuard("error", exact=False)
    for factor in (1.0, *growth):
        guard.observe(min(noise * factor, HALF[1]))


def test_one_small_gap_does_not_lower_the_limit_of_those_to_come() -> None:
    guard = WeightsGuard("error", exact=False)
    for gap in (0.005, 0.012, 0.021, 0.0215, 0.03, 0.06, 0.07, 0.08):
        guard.observe(gap)


def test_gaps_that_grow_with_the_run_are_compared_with_the_recent_ones() -> None:
    """Gaps grow as answers do: a hundredfold in 40 updates. Then the weights are old."""
    guard = WeightsGuard("error", exact=True)
    for update in range(41):
        guard.observe(2e-4 * 100 ** (update / 40))
    usual = 2e-4 * 100 ** (30.5 / 40)  # the median of the last 20
    assert guard.limit == pytest.approx(GROWTH * usual, rel=0.01)
    guard.observe(1.1 * guard.limit)
    with pytest.raises(StaleWeights):
        guard.observe(1.1 * guard.limit)


@given(st.floats(0, FP32[0]))
def test_a_gap_far_beyond_the_usual_is_seen(noise: float) -> None:
    guard = WeightsGuard("error", exact=True)
    guard.observe(noise)
    guard.observe(0.02)
    with pytest.raises(StaleWeights):
        guard.observe(0.02)


def test_only_the_tokens_marked_count() -> None:
    trained, sampled = torch.tensor([[0.0, -1.0], [-2.0, math.nan]]), torch.tensor([[-0.5, -1.0], [-9.0, 0.0]])
    assert gap_sums(trained, sampled, torch.tensor([[True, True], [False, False]])).tolist() == [0.5, 2.0]
    assert mean_gap([0.5, 2.0]) == 0.25
    assert mean_gap([0.0, 0.0]) is None
