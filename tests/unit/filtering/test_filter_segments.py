"""Segment operations do to all groups at once what a loop does to each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goldilocks.filtering.rows import Segments, first_occurrence_codes

KEYS = st.lists(st.integers(0, 5), max_size=40).map(sorted)


@pytest.mark.parametrize("kind", [list, np.array, lambda u: np.array(u, dtype=object), tuple])
def test_uids_are_numbered_by_first_occurrence_also_integers_of_a_tensor(kind: object) -> None:
    assert first_occurrence_codes(kind(["b", "b", "a", "b", "c", "a"])).tolist() == [0, 0, 1, 0, 2, 1]  # type: ignore[operator]
    assert first_occurrence_codes(torch.tensor([7, 3, 3, 7])).tolist() == [0, 1, 1, 0]
    assert first_occurrence_codes([("a", 1), ("b", 1), ("a", 1)]).tolist() == [0, 1, 0]
    assert first_occurrence_codes([]).tolist() == []


@settings(max_examples=60)
@given(KEYS, st.randoms(use_true_random=False))
def test_reductions_equal_those_of_each_group_alone(keys: list[int], random: object) -> None:
    values = torch.tensor([random.uniform(-3, 3) for _ in keys], dtype=torch.float64)  # type: ignore[attr-defined]
    sorted_keys = torch.tensor(keys, dtype=torch.int64)
    segments = Segments.from_sorted(sorted_keys)
    parts = [values[sorted_keys == key] for key in dict.fromkeys(keys)]
    assert len(segments) == len(parts)
    assert segments.sizes.tolist() == [len(part) for part in parts]
    assert segments.position.tolist() == [place for part in parts for place in range(len(part))]
    assert segments.min(values).tolist() == [part.min().item() for part in parts]
    assert segments.max(values).tolist() == [part.max().item() for part in parts]
    assert segments.sum(values > 0).tolist() == [int((part > 0).sum()) for part in parts]
    torch.testing.assert_close(segments.sum(values), torch.tensor([part.sum() for part in parts], dtype=torch.float64))
    wanted = torch.tensor([part.std() if len(part) > 1 else torch.nan for part in parts], dtype=torch.float64)
    torch.testing.assert_close(segments.std(values), wanted, equal_nan=True)
    ordered = values[segments.sort_within(values)]
    torch.testing.assert_close(ordered, torch.cat([part.sort().values for part in parts] or [values]))


def test_equal_values_have_exactly_no_deviation_however_large_they_are() -> None:
    values = torch.tensor([0.1, 0.1, 0.1, 1e9 + 0.1, 1e9 + 0.1], dtype=torch.float64)
    assert Segments.from_sorted(torch.tensor([0, 0, 0, 1, 1])).std(values).tolist() == [0.0, 0.0]


def test_sorting_keeps_ties_in_order_and_takes_negative_numbers_and_both_zeros() -> None:
    keys = torch.tensor([0.0, -1.0, -0.0, -torch.inf, 2.0, 5.0, 5.0])
    ragged, even = Segments.from_sorted(torch.tensor([0] * 5 + [1, 1])), Segments.from_sorted(torch.zeros(7))
    assert ragged.sort_within(keys).tolist() == even.sort_within(keys).tolist() == [3, 1, 0, 2, 4, 5, 6]


@settings(max_examples=40)
@given(st.lists(st.floats(-2, 2, width=16), min_size=12, max_size=12))
def test_runs_of_one_size_are_sorted_as_others_are(values: list[float]) -> None:
    keys = torch.tensor(values)
    even = Segments.from_sorted(torch.arange(12) // 4)
    ragged = Segments.from_sorted(torch.cat([torch.arange(12) // 4, torch.tensor([3])]))
    assert even.sort_within(keys).tolist() == ragged.sort_within(torch.cat([keys, torch.zeros(1)])).tolist()[:12]
