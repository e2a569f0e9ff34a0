"""Accuracy against cost, between the validations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldilocks.compare.curve import at, cost_to_reach, curve, mean_curve

RISING = curve([(0, 0.2), (100, 0.4), (300, 0.8)])

points = st.dictionaries(st.integers(1, 500), st.floats(0, 1), min_size=1, max_size=8)
curves = points.map(lambda found: curve([(0, 0.25), *found.items()]))


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


def test_the_cost_of_an_accuracy_is_where_the_line_first_has_it():
    assert cost_to_reach(RISING, 0.3) == pytest.approx(50)
    assert cost_to_reach(curve([(0, 0.1), (10, 0.5), (20, 0.2), (30, 0.6)]), 0.5) == 10
    assert cost_to_reach(RISING, 0.2) == 0
    assert cost_to_reach(RISING, 0.1) == 0


def test_an_accuracy_it_never_has_is_not_reached():
    assert cost_to_reach(RISING, 0.81) is None
    assert cost_to_reach({}, 0.1) is None


def test_the_mean_has_a_point_wherever_one_of_them_has():
    mean = mean_curve([curve([(0, 0.0), (200, 1.0)]), curve([(0, 0.2), (100, 0.2), (200, 0.4)])], 150)
    assert mean == pytest.approx({0: 0.1, 100: 0.35, 150: (0.75 + 0.3) / 2})


@settings(max_examples=100)
@given(curves, st.floats(0, 1))
def test_at_the_cost_to_reach_it_the_curve_has_the_accuracy_and_not_before(line, accuracy):
    cost = cost_to_reach(line, accuracy)
    if cost is None:
        assert max(line.values()) < accuracy
    else:
        value = at(line, cost)
        assert value is not None
        assert value >= accuracy - 1e-9
        assert all(known < accuracy for before, known in line.items() if before < cost)


@settings(max_examples=100)
@given(st.lists(curves, min_size=1, max_size=4))
def test_the_mean_of_curves_is_the_mean_everywhere(lines):
    until = min(max(line) for line in lines)
    mean = mean_curve(lines, until)
    for cost in (0, until / 3, until / 2, until):
        assert at(mean, cost) == pytest.approx(sum(at(line, cost) for line in lines) / len(lines), abs=1e-9)
    assert list(mean) == sorted(mean)
    assert list(mean)[-1] == until
