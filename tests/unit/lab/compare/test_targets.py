"""Accuracy against cost between the validations, and what it costs to learn as much as a baseline."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldilocks.lab.compare.study import at, curve
from goldilocks.lab.compare.table import SHARES_OF_GAIN, Estimate, targets

RISING = curve([(0, 0.2), (100, 0.4), (300, 0.8)])


def test_between_two_validations_it_is_a_straight_line():
    assert at(RISING, 0) == 0.2
    assert at(RISING, 50) == pytest.approx(0.3)
    assert at(RISING, 200) == pytest.approx(0.6)
    assert at(RISING, 300) == 0.8


def test_outside_of_what_was_measured_nothing_is_said():
    assert at(RISING, 301) is None
    assert at(curve([(10, 0.5)]), 9) is None


def test_of_two_validations_at_the_same_cost_the_later_counts():
    assert curve([(0, 0.1), (50, 0.2), (50, 0.3)]) == {0: 0.1, 50: 0.3}


UNTIL = 400
LINE = curve([(0, 0.2), (400, 0.6)])


def test_a_target_is_a_share_of_the_baselines_gain_and_its_cost_is_read_off_the_curve():
    found = targets([curve([(0, 0.2), (100, 0.4), (400, 0.8)])], [LINE], UNTIL)
    assert [one.accuracy for one in found] == pytest.approx([0.4, 0.5, 0.56, 0.6])
    assert [one.cost.value for one in found] == pytest.approx([100, 175, 220, 250])
    assert [one.ratio.value for one in found] == pytest.approx([100 / 200, 175 / 300, 220 / 360, 250 / 400])
    assert {one.cost.interval for one in found} == {None}, "of one seed there is no interval"
    assert {one.reached for one in found} == {1.0}


def test_a_recipe_that_ends_below_a_target_has_not_reached_it():
    half, three_quarters, *_ = targets([curve([(0, 0.2), (400, 0.45)])], [LINE], UNTIL)
    assert half.cost.value == pytest.approx(320)
    assert three_quarters.cost == three_quarters.ratio == Estimate(None, None)
    assert three_quarters.reached == 0


def test_what_lies_beyond_the_equal_cost_does_not_count():
    *_, whole = targets([curve([(0, 0.2), (400, 0.3), (500, 0.9)])], [LINE], UNTIL)
    assert whole.cost.value is None


def test_the_first_time_counts_though_the_curve_falls_back():
    half, *_ = targets([curve([(0, 0.1), (10, 0.4), (20, 0.2), (400, 0.9)])], [LINE], UNTIL)
    assert half.cost.value == pytest.approx(10)


def test_a_recipe_that_begins_above_a_target_has_it_for_nothing():
    half, *_ = targets([curve([(0, 0.5), (400, 0.9)])], [LINE], UNTIL)
    assert (half.cost.value, half.ratio.value) == (0, 0)


def test_of_a_baseline_that_has_not_gained_there_are_no_targets():
    assert targets([LINE], [curve([(0, 0.4), (200, 0.6), (400, 0.4)])], UNTIL) == ()


def test_rounding_of_a_mean_is_no_gain():
    """The seeds end with each other's accuracies, so that the mean stays what it was, but for its last digit."""
    before, after = (0.2775, 0.645, 0.1775), (0.645, 0.1775, 0.2775)
    baseline = [curve([(0, low), (400, high)]) for low, high in zip(before, after, strict=True)]
    assert targets([LINE] * 3, baseline, UNTIL) == ()


def test_seeds_that_agree_leave_no_doubt_of_the_ratio():
    half, *_ = targets([curve([(0, 0.2), (200, 0.6), (400, 0.6)])] * 3, [LINE] * 3, UNTIL)
    assert half.ratio.value == pytest.approx(0.5)
    assert half.ratio.interval == pytest.approx((0.5, 0.5))
    assert half.cost.interval == pytest.approx((100, 100))


def test_the_interval_is_of_the_seeds_drawn_in_pairs():
    """The second seed is twice as fast for both: the cost varies with the draw, the ratio does not."""
    fast, faster = curve([(0, 0.2), (200, 0.6), (400, 0.6)]), curve([(0, 0.2), (100, 0.6), (400, 0.6)])
    half, *_ = targets([fast, faster], [curve([(0, 0.2), (400, 0.6)]), fast], UNTIL)
    low, high = half.cost.interval
    assert (low, high) == pytest.approx((50, 100))
    assert half.ratio.interval == pytest.approx((0.5, 0.5))


def test_an_interval_has_no_upper_end_where_draws_do_not_reach_the_target():
    """Of four seeds one learns nothing: 5% of the draws have it three times or more, and miss half of the gain."""
    learns, not_at_all = curve([(0, 0.2), (200, 0.7), (400, 0.7)]), curve([(0, 0.2), (400, 0.2)])
    half, *_ = targets([learns, learns, learns, not_at_all], [LINE] * 4, UNTIL)
    assert half.reached == pytest.approx(1 - 13 / 256, abs=0.01)
    assert half.cost.value == pytest.approx(200 * 0.2 / 0.375)
    low, high = half.ratio.interval
    assert low == pytest.approx(0.4)
    assert high is None
    whole = targets([not_at_all] * 4, [LINE] * 4, UNTIL)[-1]
    assert whole.reached == 0
    assert whole.cost == Estimate(None, (None, None))


def test_draws_in_which_the_baseline_gains_nothing_are_left_out_and_counted():
    """Of two seeds the baseline gains in the first alone: a quarter of the draws are the second one twice."""
    flat = curve([(0, 0.2), (400, 0.2)])
    half, *_ = targets([LINE, LINE], [LINE, flat], UNTIL)
    assert half.gained == pytest.approx(0.75, abs=0.02)
    assert half.reached == 1
    assert half.ratio.interval == pytest.approx((0.5, 1.0))


accuracies = st.lists(st.floats(0, 1), min_size=3, max_size=3)


@settings(max_examples=settings.default.max_examples)
@given(st.lists(accuracies, min_size=1, max_size=4), st.lists(accuracies, min_size=4, max_size=4))
def test_at_the_cost_of_a_target_the_mean_has_it_and_not_before_and_the_baseline_reaches_its_own(own, its):
    lines = [curve([(0, 0.25), (130, a), (260, b), (410, c)]) for a, b, c in own]
    baseline = [curve([(0, 0.25), (100, a), (250, b), (410, c)]) for a, b, c in its[: len(own)]]

    def mean(cost):
        return sum(at(line, cost) for line in lines) / len(lines)

    found = targets(lines, baseline, UNTIL)
    for one in found:
        if one.cost.value is None:
            assert all(mean(cost) < one.accuracy + 1e-9 for cost in (0, 130, 260, UNTIL))
        else:
            assert mean(one.cost.value) == pytest.approx(max(one.accuracy, 0.25), abs=1e-9)
            assert all(mean(cost) < one.accuracy + 1e-9 for cost in (0, 130, 260, UNTIL) if cost < one.cost.value)
    its_own = targets(baseline, baseline, UNTIL)
    assert len(its_own) == len(found) in (0, len(SHARES_OF_GAIN))
    assert all(one.ratio.value == 1 and one.reached == 1 for one in its_own)
