"""Which prompts resemble one another, by a column or by their text."""

from __future__ import annotations

import numpy as np
import pytest

from goldilocks.core import ListSource
from goldilocks.core.strata import StrataSettings


def strata(source: ListSource, *columns: str) -> np.ndarray:
    """The finest strata of the first tree."""
    return StrataSettings(list(columns)).of(source)[0][-1]


def many(*values: object) -> list[object]:
    return [value for value in values for _ in range(8)]


def distinct(codes: np.ndarray) -> int:
    return len(np.unique(codes))


@pytest.mark.parametrize("values", [many(1, 2, 3), many("1", "2", "3"), many(1.0, 2.0, 3.0), many("a", "b", None)])
def test_a_stratum_is_a_value_of_a_column_word_or_number(values):
    codes = strata(ListSource(range(24), columns={"level": values}), "level")
    assert [distinct(part) for part in np.split(codes, 3)] == [1, 1, 1]
    assert distinct(codes) == 3


def test_columns_divide_one_another():
    source = ListSource(range(32), columns={"skill": many("a", "a", "b", "b"), "level": many(1, 2, 1, 2)})
    trees = StrataSettings(["skill", "level"]).of(source)
    assert [[distinct(depth) for depth in tree] for tree in trees] == [[2, 4], [2, 4]]
    assert trees[0][0].tolist() != trees[1][0].tolist(), "each column is the first that divides once"


def test_many_different_numbers_are_divided_by_their_order():
    source = ListSource(range(1000), columns={"length": np.linspace(0, 1, 1000).tolist()})
    ((coarse, fine),) = StrataSettings(["length"]).of(source)
    assert (distinct(coarse), distinct(fine)) == (8, 32)
    assert (np.diff(coarse) >= 0).all()


def test_values_of_a_few_prompts_stay_together():
    source = ListSource(range(20), columns={"name": ["common"] * 10 + [f"name {number}" for number in range(10)]})
    assert distinct(strata(source, "name")) == 2


def test_texts_are_alike_whose_numbers_have_as_many_digits():
    texts = [f"add: {10**digits + number} + 5 =" for digits in (1, 2) for number in range(8)]
    codes = strata(ListSource(texts))
    assert distinct(codes) == 2
    assert distinct(codes[:8]) == 1


def test_the_sign_that_stands_before_an_answer_is_no_number():
    texts = [f"add {10**digits + number}; answer after ####" for digits in (1, 2) for number in range(8)]
    numbers_first = StrataSettings().of(ListSource(texts))[2]
    assert distinct(numbers_first[0]) == 2


def test_words_that_hardly_any_prompt_has_make_no_difference():
    texts = [
        f"{word} buys {number} pens" for number, word in enumerate(["Ann", "Bo", "Cy", "Di", "Ed", "Flo", "Gus", "Hy"])
    ]
    assert distinct(strata(ListSource(texts))) == 1


def test_prompts_without_a_text_are_one_stratum():
    assert distinct(strata(ListSource([f"easy {number}" for number in range(9)], readable=False))) == 1


def test_the_source_of_the_data_divides_texts_first():
    source = ListSource(["say it"] * 16, columns={"data_source": many("a", "b")})
    assert distinct(strata(source)) == 2
