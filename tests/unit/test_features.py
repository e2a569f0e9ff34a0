"""Features of prompts without a model."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from datasets import Dataset
from numpy.testing import assert_allclose

from goldilocks.core import ListSource
from goldilocks.core.source import column
from goldilocks.features import (
    LENGTHS,
    SAMPLE,
    Features,
    column_features,
    reduce,
    text_features,
    with_intercept,
)

SUMS = [f"Calculate {a} {'+-'[a % 2]} {b}." for a in range(20) for b in (3, 40, 500)]


def matrix(texts, columns=None, **settings):
    return Features(columns=list(columns or {}), **settings).of(ListSource(texts, columns=columns))


def test_numbers_count_by_how_many_digits_they_have():
    one, same, other = text_features(["add 17 and 250", "add 23 and 118", "add 1 and 250"])
    assert_allclose(one, same)
    assert abs(one - other).max() > 0


def test_a_sign_is_no_number():
    sign, dash = text_features(["answer after #: 5", "answer after -: 5"])
    assert_allclose(sign[:LENGTHS], dash[:LENGTHS])


def test_features_are_the_same_in_every_process():
    code = "from goldilocks.features import text_features; print(text_features(['How many 7s in 77?']).sum())"
    sums = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
                       capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(sums) == 1


def test_the_matrix_has_an_intercept_and_standard_columns():
    x = matrix(SUMS, {"level": list(range(len(SUMS)))}, dimensions=6)
    assert x.shape[0] == len(SUMS)
    assert 8 <= x.shape[1] <= 1 + 4 + 6 + 1
    assert (x[:, 0] == 1).all()
    assert_allclose(x[:, 1:].mean(axis=0), 0, atol=1e-5)
    assert_allclose(x[:, 1:].std(axis=0), 1, atol=1e-4)


def test_components_keep_what_varies_most():
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((300, 2))
    wide = latent @ rng.standard_normal((2, 40)) + 0.01 * rng.standard_normal((300, 40))
    two = reduce(lambda rows: wide[rows], 300, 2)
    fit, *_ = np.linalg.lstsq(with_intercept(two), latent, rcond=None)
    assert_allclose(with_intercept(two) @ fit, latent, atol=0.2)


def test_more_prompts_than_the_sample_are_all_projected():
    size = SAMPLE + 5
    column = np.arange(size, dtype=float)[:, None]
    assert_allclose(np.abs(np.diff(reduce(lambda rows: column[rows], size, 1)[:, 0]) / 1e-4).std(), 0, atol=1e-3)


def test_what_is_missing_in_a_column_counts_as_its_mean():
    assert_allclose(column_features("level", [1, None, 3]), [[1], [2], [3]])


def test_a_column_of_words_has_a_column_for_each():
    assert_allclose(
        column_features("level", ["easy", "hard", "easy", None]), [[1, 0, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]
    )
    assert column_features("name", [f"name {number}" for number in range(100)]).shape == (100, 32)
    x = matrix(SUMS, {"level": ["easy", "hard"] * (len(SUMS) // 2)})
    assert np.abs(x[:, 1:].T @ np.tile([1.0, -1.0], len(SUMS) // 2)).max() == pytest.approx(len(SUMS), rel=1e-3)


def test_one_long_text_in_a_column_does_not_make_all_as_long():
    values = ["word" * 25_000, *(f"word {number % 3}" for number in range(999))]
    tracemalloc.start()
    try:
        assert column_features("notes", values).shape == (1000, 4)
        assert tracemalloc.get_traced_memory()[1] < 10e6, "every row had the memory of the longest"
    finally:
        tracemalloc.stop()


def test_a_column_without_values_is_named():
    with pytest.raises(ValueError, match="columns='level' is not accepted: a column with values"):
        column_features("level", [None, None])


def test_what_hardly_varies_is_left_out_and_not_blown_up():
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((300, 3))
    wide = latent @ rng.standard_normal((3, 40)) + 1e-7 * rng.standard_normal((300, 40))
    assert with_intercept(reduce(lambda rows: wide[rows], 300, 10)).shape[1] == 1 + 3


def test_the_order_of_the_data_does_not_change_the_features_of_a_prompt():
    texts = [f"Calculate {a} {'+-*'[a % 3]} {b}." for a in (3, 40, 500, 6000) for b in (7, 80, 900) for _ in range(9)]
    order = np.random.default_rng(0).permutation(len(texts))
    here, moved = matrix(texts), matrix([texts[place] for place in order])
    assert here.shape == moved.shape
    assert_allclose(moved, here[order], atol=1e-2)


def table(**columns):
    return Dataset.from_dict(columns)


def test_a_column_is_of_the_data_or_of_its_extra_info_words_as_well_as_numbers():
    data = table(level=["easy", "hard"], extra_info=[{"skill": "add"}, {"skill": None}])
    assert column(data, "level", "key") == ["easy", "hard"]
    assert column(data, "skill", "key") == ["add", None]
    with pytest.raises(ValueError, match=r"key='topic' is not accepted: .* data: extra_info, level, skill"):
        column(data, "topic", "key")


def test_prompts_that_are_all_alike_have_an_intercept_only():
    assert matrix(["same"] * 5).shape == (5, 1)
