"""What a run may cost, and how much of it is spent."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.core import Accounts
from goldilocks.core.limits import Budget
from goldilocks.drive.driver import Meter


def spent(rollouts: int = 0, tokens: int = 0) -> Accounts:
    accounts = Accounts()
    for number in range(rollouts):
        accounts.post("cancelled" if number % 2 else "open", tokens // rollouts)
    return accounts


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rollouts": 0}, "goldilocks.budget.rollouts=0 is not accepted: a number above 0"),
        ({"tokens": -1}, "goldilocks.budget.tokens=-1"),
        ({"seconds": float("inf")}, "goldilocks.budget.seconds=inf"),
        ({"rollouts": "many"}, "goldilocks.budget.rollouts='many'"),
        ({"rollouts": 8, "validations": 0}, "goldilocks.budget.validations=0 is not accepted: 1 or more"),
        ({"validations": 3}, "null without a budget of rollouts, tokens, seconds"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Budget(**given)


def test_every_rollout_that_arrived_is_charged_whatever_became_of_it_and_of_several_costs_the_furthest_counts():
    assert Meter(Budget(rollouts=10), spent(rollouts=5)).share == 0.5
    assert Meter(Budget(tokens=100), spent(rollouts=5, tokens=25)).share == 0.25
    assert Meter(Budget(rollouts=10, tokens=100), spent(rollouts=5, tokens=80)).share == 0.8


def test_without_a_budget_nothing_is_ever_spent():
    meter = Meter(Budget(), spent(rollouts=5))
    assert (meter.share, meter.validation_due(), meter.budget.costs) == (0.0, False, {})


def test_seconds_are_those_of_the_updates_and_go_on_over_a_restart():
    meter = Meter(Budget(seconds=1), spent())
    meter.begin_update()
    time.sleep(0.02)
    measured = meter.end_update()
    time.sleep(0.02)
    assert meter.seconds == measured >= 0.02
    restarted = Meter(Budget(seconds=1), spent())
    restarted.load_state_dict(meter.state_dict())
    assert restarted.share == meter.share == measured


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 12))
def test_validations_are_spread_over_the_cost_and_none_is_due_twice(updates, validations):
    accounts = Accounts()
    meter = Meter(Budget(rollouts=100, validations=validations), accounts)
    for rollouts in updates:
        before = int(meter.share * validations)
        for _ in range(rollouts):
            accounts.post("open", 1)
        assert meter.validation_due() == (int(meter.share * validations) > before)
        assert not meter.validation_due()
