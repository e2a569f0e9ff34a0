"""All draws at once: the figures of verl's own loop, to the last digit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verl.trainer.ppo import metric_utils

from goldilocks.verl.patches.speed import best_of_all_draws

VERLS = metric_utils.bootstrap_metric
VERLS = getattr(VERLS, "__wrapped__", VERLS)  # another test of this process may have applied the patch
QUICK = best_of_all_draws(VERLS)

numbers = st.one_of(st.booleans(), st.integers(-3, 3), st.floats(-1e6, 1e6, width=32))


@given(values=st.lists(numbers, min_size=2, max_size=6), size=st.integers(1, 8), seed=st.integers(0, 9))
def test_best_and_worst_are_verls_and_so_is_what_is_drawn_next(values: list[float], size: int, seed: int) -> None:
    asked = {"data": values, "subset_size": size, "reduce_fns": [np.max, np.min], "n_bootstrap": 20, "seed": seed}
    found = QUICK(**asked)
    drawn_next = np.random.random()
    assert (found, drawn_next) == (VERLS(**asked), np.random.random())


LEFT = ([1.0, float("nan")], ["a", "b"], [10**400, 1], [[1, 2], [3, 0]], [[1, 2], [3]], [np.float32(0.1), 0.1])


@pytest.mark.parametrize("values", LEFT)
def test_what_is_no_finite_number_of_full_precision_is_left_to_verl(values: list[object]) -> None:
    asked = {"data": values, "subset_size": 2, "reduce_fns": [np.max], "n_bootstrap": 50}
    outcomes = []
    for function in (VERLS, QUICK):
        try:
            outcomes.append(repr(function(**asked)))
        except (TypeError, ValueError, OverflowError) as error:
            outcomes.append(repr(error))
    assert outcomes[0] == outcomes[1]


def test_votes_are_left_to_verl() -> None:
    votes = [{"val": 1.0, "pred": "x"}, {"val": 0.0, "pred": "y"}, {"val": 1.0, "pred": "x"}]
    fn = partial(metric_utils.calc_maj_val, vote_key="pred", val_key="val")
    assert QUICK(votes, 3, [fn], 50) == VERLS(votes, 3, [fn], 50)
