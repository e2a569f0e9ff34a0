"""Accuracy by the columns of the validation data."""

from __future__ import annotations

import pytest

from goldilocks.runs.history import MOST_VALUES, accuracy_by, by_column, column_and_value, metric_name, value_of


def test_the_mean_of_each_value_and_a_column_with_one_for_each_row_is_refused():
    found = accuracy_by("level", [1, 2, 1, 2.0], [1.0, 0.0, 0.5, 1.0])
    assert found == {"val/level/1/acc": 0.75, "val/level/2/acc": 0.5}
    many = list(range(MOST_VALUES + 1))
    with pytest.raises(ValueError, match=r"goldilocks\.validate_by='index'"):
        accuracy_by("index", many, [0.0] * len(many))


@pytest.mark.parametrize("value", ["sort", 3, "a/b", "two\nlines", "<script>", ""])
def test_a_name_says_its_column_and_value(value):
    assert column_and_value(metric_name("skill", value)) == ("skill", str(value))


@pytest.mark.parametrize("name", ["val-core/eval/reward/mean@1", "val-aux/x/acc/mean@4", "train/keep_rate", "val/acc"])
def test_other_metrics_are_no_accuracy_by_column(name):
    assert column_and_value(name) is None


def test_a_column_is_looked_for_in_the_row_and_in_its_extra_info():
    row = {"data_source": "x", "extra_info": {"level": 3}}
    assert value_of(row, "data_source") == "x"
    assert value_of(row, "level") == 3
    with pytest.raises(ValueError, match=r"goldilocks\.validate_by='levle' .*data_source, extra_info, level"):
        value_of(row, "levle")


def test_the_accuracies_of_a_validation_by_column_have_numbers_in_their_order():
    metrics = {
        "val/level/10/acc": 0.1,
        "val/skill/sort/acc": 0.5,
        "val/level/9/acc": 0.2,
        "val-core/eval/reward/mean@4": 1.0,
    }
    found = by_column({**metrics, "val/level/none/acc": 0.3})
    assert [(column, list(own.items())) for column, own in found.items()] == [
        ("level", [("9", 0.2), ("10", 0.1), ("none", 0.3)]),
        ("skill", [("sort", 0.5)]),
    ]
    assert by_column({"val-core/eval/reward/mean@4": 1.0}) == {}
