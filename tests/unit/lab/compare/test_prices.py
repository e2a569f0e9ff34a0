"""Accuracy at a cost, and what it costs to be as accurate as a baseline."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.lab.compare.arms import result

from goldilocks.lab.compare.arm import EqualCost
from goldilocks.lab.compare.table import PARTS, Price, price

COSTS = np.linspace(0, 400, PARTS + 1)


def accuracy(points, cost):
    return result("grpo", points).accuracy_at(EqualCost("rollouts", cost))


def line(*points):
    """Accuracies at ``COSTS`` of one seed, on straight lines between the points."""
    return np.interp(COSTS, [x for x, _ in points], [y for _, y in points])


def prices(own, baseline):
    return [price(COSTS, np.array(own), np.array(baseline), share) for share in (0.5, 1.0)]


def test_accuracy_at_a_cost_is_the_mean_of_the_last_three_tenths_of_it():
    flat_then_high = [(0, 0.2), (80, 0.2), (90, 0.3), (100, 0.7)]
    assert accuracy(flat_then_high, 100) == pytest.approx((0.2 + 0.3 + 0.7) / 3)
    assert accuracy(flat_then_high, 0) == pytest.approx(0.2)
    with pytest.raises(AssertionError, match="ended after 100 rollouts"):
        accuracy([(0, 0.2), (100, 0.4)], 101)


def test_between_two_validations_it_is_a_straight_line_and_of_two_at_the_same_cost_the_later_counts():
    assert accuracy([(0, 0.2), (100, 0.4), (300, 0.8)], 300) == pytest.approx((0.8 + 0.74 + 0.68) / 3)
    assert accuracy([(0, 0.1), (50, 0.2), (50, 0.3), (100, 0.3)], 100) == pytest.approx(0.3)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=6), st.floats(0.1, 1.0), st.floats(0.2, 5.0))
def test_one_that_learns_faster_has_each_accuracy_sooner_by_as_much(found, share, faster):
    """The averaging moves no ratio of costs."""
    points = [(100 * number, value) for number, value in enumerate(found)]
    sooner = [(x / faster, value) for x, value in points]
    cost = share * points[-1][0]
    assert accuracy(sooner, min(cost / faster, sooner[-1][0])) == pytest.approx(accuracy(points, cost), abs=1e-9)


LINE = line((0, 0.2), (400, 0.6))


def test_a_price_is_of_the_baselines_accuracy_at_a_share_of_the_clock():
    half, whole = prices([line((0, 0.2), (100, 0.4), (400, 0.8))], [LINE])
    assert (half.accuracy, half.cost, half.ratio) == pytest.approx((0.4, 100, 0.5))
    assert (whole.accuracy, whole.cost, whole.ratio) == pytest.approx((0.6, 250, 250 / 400), abs=1e-3)
    assert half.interval is None, "of one seed there is no interval"


def test_a_recipe_that_ends_below_has_not_reached_it_and_the_first_time_counts_though_the_curve_falls_back():
    assert prices([line((0, 0.2), (400, 0.5))], [LINE])[-1] == Price(1.0, pytest.approx(0.6), None, None, None)
    assert prices([line((0, 0.1), (10, 0.5), (20, 0.2), (400, 0.9))], [LINE])[0].cost < 10


def test_a_baseline_pays_its_own_price():
    half, whole = prices([LINE, LINE], [LINE, LINE])
    assert (half.ratio, whole.ratio) == pytest.approx((1, 1))
    assert whole.interval == pytest.approx((1, 1))


def test_the_interval_is_of_the_seeds_in_pairs():
    """Seeds differ by far more than the recipes do, and both recipes alike: the ratio is sure all the same."""
    own = [line((0, start), (200, start + 0.4), (400, start + 0.4)) for start in (0.1, 0.2, 0.4)]
    baseline = [line((0, start), (400, start + 0.4)) for start in (0.1, 0.2, 0.4)]
    assert prices(own, baseline)[1].interval == pytest.approx((0.5, 0.5), abs=2e-3)


def test_an_interval_has_no_upper_end_where_the_seeds_do_not_tell_that_it_is_reached():
    learns, not_at_all = line((0, 0.2), (200, 0.9), (400, 0.9)), line((0, 0.2), (400, 0.2))
    whole = prices([learns, learns, not_at_all], [LINE] * 3)[-1]
    assert whole.cost is not None
    low, high = whole.interval
    assert 0 <= low < whole.ratio
    assert high is None
    assert prices([not_at_all] * 3, [LINE] * 3)[-1].interval == (None, None)


@pytest.mark.parametrize(
    ("seeds", "noise", "faster"), [(3, 0.005, 2.0), (3, 0.02, 1.0), (5, 0.005, 1.0), (5, 0.02, 2.0)]
)
def test_intervals_of_ratios_cover_what_they_say(seeds, noise, faster):
    """Seeds learn 0.10 ± 0.03 in 1,000 rollouts, and every validation has its noise; the true ratio is known."""
    random = np.random.default_rng(7)
    places, studies = np.linspace(0, 1000, 11), 400
    costs = np.linspace(0, 1000, PARTS + 1)

    def seed(faster):
        found = 0.4 + random.normal(0.1, 0.03) * faster * places / 1000 + random.normal(0, noise, 11)
        return result("grpo", list(zip(places.tolist(), found.tolist(), strict=True))).accuracies("rollouts", costs)

    covered = dict.fromkeys((0.5, 1.0), 0)
    for _ in range(studies):
        own, baseline = np.array([seed(faster) for _ in range(seeds)]), np.array([seed(1.0) for _ in range(seeds)])
        for share in covered:
            low, high = price(costs, own, baseline, share).interval
            covered[share] += (
                (np.inf if low is None else low) - 2e-3 <= 1 / faster <= (np.inf if high is None else high)
            )
    assert min(covered.values()) >= 0.92 * studies, covered


@settings(max_examples=settings.default.max_examples)
@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=4), st.floats(0, 1))
def test_at_its_cost_the_mean_has_the_accuracy_and_not_before(own, end):
    lines = np.array([line((0, 0.25), (130, a), (260, b), (400, c)) for a, b, c in own])
    baseline = np.array([line((0, 0.25), (400, end))] * len(own))
    for one in (price(COSTS, lines, baseline, share) for share in (0.5, 0.75, 1.0)):
        mean = lines.mean(axis=0)
        before = (np.inf if one.cost is None else one.cost) > COSTS
        assert (mean[before] < one.accuracy).all()
        assert one.cost is None or mean[one.cost == COSTS][0] >= one.accuracy - 1e-8
