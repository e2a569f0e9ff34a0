"""Confidence intervals over few seeds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldilocks.lab import Interval, t_mass, t_quantile


@pytest.mark.parametrize(
    ("confidence", "freedom", "t"),
    [
        (0.95, 1, 12.706204736),
        (0.95, 2, 4.302652730),
        (0.95, 9, 2.262157163),
        (0.95, 120, 1.979930405),
        (0.99, 2, 9.924843201),
        (0.99, 7, 3.499483297),
    ],
)
def test_the_quantiles_are_those_of_the_printed_tables(confidence, freedom, t):
    assert t_quantile(confidence, freedom) == pytest.approx(t, rel=1e-8)


@settings(max_examples=50)
@given(st.floats(0, 50), st.integers(1, 60))
def test_the_mass_is_a_probability_that_grows_with_t(t, freedom):
    mass, more = t_mass(t, freedom), t_mass(t + 0.5, freedom)
    assert 0 <= mass <= more + 1e-12
    assert more <= 1 + 1e-12


@settings(max_examples=50)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.floats(-5, 5), st.floats(0.1, 10))
def test_an_interval_moves_and_stretches_with_its_values(values, shift, scale):
    one, other = Interval.of(values), Interval.of([shift + scale * value for value in values])
    assert other.mean == pytest.approx(shift + scale * one.mean, abs=1e-9)
    assert other.half == pytest.approx(scale * one.half, abs=1e-9)
