"""Accuracy against cost, between the validations."""

from __future__ import annotations

import pytest

from goldilocks.compare.study import at, curve

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
