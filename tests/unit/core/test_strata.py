"""Which prompts resemble one another, by a column or by their text."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from goldilocks.core import ListSource
from goldilocks.core import strata as strata_module
from goldilocks.core.strata import StrataSettings, text_labels, words
from goldilocks.hashing import content_key


def strata(source: ListSource, *columns: str) -> list[np.ndarray]:
    """The strata of each division."""
    return [one.strata for one in StrataSettings(list(columns)).of(source)]


def many(*values: object) -> list[object]:
    return [value for value in values for _ in range(8)]


def sizes(found: list[np.ndarray]) -> list[int]:
    return [len(np.unique(one)) for one in found]


@pytest.mark.parametrize("values", [many(1, 2, 3), many("1", "2", "3"), many(1.0, 2.0, 3.0), many("a", "b", None)])
def test_a_stratum_is_a_value_of_a_column_word_or_number(values):
    (codes,) = strata(ListSource(range(24), columns={"level": values}), "level")
    assert [len(np.unique(part)) for part in np.split(codes, 3)] == [1, 1, 1]
    assert len(np.unique(codes)) == 3


def test_each_column_is_a_division_and_both_together_are_one():
    source = ListSource(range(32), columns={"skill": many("a", "a", "b", "b"), "level": many(1, 2, 1, 2)})
    assert sorted(sizes(strata(source, "skill", "level"))) == [2, 2, 4]


def test_many_different_numbers_are_divided_by_their_order():
    found = strata(ListSource(range(1000), columns={"length": np.linspace(0, 1, 1000).tolist()}), "length")
    assert sorted(sizes(found)) == [8, 32]
    assert sorted([np.count_nonzero(np.diff(one)) for one in found]) == [7, 31], "a stratum is a stretch of numbers"


def test_neighbours_of_nine_numbers_or_more_are_alike_too():
    levels = [level for level in range(12) for _ in range(8)]
    one, near = strata(ListSource(range(96), columns={"level": levels}), "level")
    assert len(np.unique(one)) == 12
    assert [near[8 * level] for level in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert len(strata(ListSource(range(64), columns={"level": levels[:64]}), "level")) == 1


def test_values_of_a_few_prompts_stay_together():
    source = ListSource(range(20), columns={"name": ["common"] * 10 + [f"name {number}" for number in range(10)]})
    assert sizes(strata(source, "name")) == [2]


def test_texts_are_alike_whose_numbers_have_as_many_digits():
    texts = [f"add: {10**digits + number} + 5 =" for digits in (1, 2) for number in range(8)]
    by_digits = [one for one in strata(ListSource(texts)) if len(np.unique(one[:8])) == len(np.unique(one[8:])) == 1]
    assert any(one[0] != one[8] for one in by_digits)


def test_the_sign_that_stands_before_an_answer_is_no_number():
    texts = [f"add {'1 ' * count}; answer after ####" for count in (1, 2) for _ in range(8)]
    assert 2 in sizes(strata(ListSource(texts)))


def test_prompts_without_a_text_or_with_names_that_hardly_any_has_have_no_strata():
    names = ["Ann", "Bob", "Cyd", "Dan", "Eve", "Flo", "Gus", "Hal"]
    assert strata(ListSource([f"{name} buys 5 pens" for name in names])) == []
    assert strata(ListSource([f"easy {number}" for number in range(9)], readable=False)) == []


def test_the_source_of_the_data_is_a_division_too():
    assert sizes(strata(ListSource(["say it"] * 16, columns={"data_source": many("a", "b")}))) == [2]


def test_a_stratum_has_the_same_key_in_data_of_another_order():
    texts = [f"{'add' if number % 2 else 'compare'}: {number} and {number**2}" for number in range(64)]
    there, back = StrataSettings().of(ListSource(texts)), StrataSettings().of(ListSource(texts[::-1]))
    for one, other in zip(there, back, strict=True):
        assert one.keys[one.strata].tolist() == other.keys[other.strata][::-1].tolist()


@pytest.mark.parametrize("remembered", [strata_module.PIECES, 40])
def test_labels_of_texts_follow_the_plain_rule(monkeypatch, remembered):
    monkeypatch.setattr(strata_module, "PIECES", remembered)
    rng = random.Random(0)
    known = ["the", "The", "of", "why,", "snake_case", "x-ray", "x", "ray", "Straße", "٣٤", "7", "42,", "1,000", "####"]
    blanks = [" ", "  ", "\n", "\u3000", "\x1f"]
    drawn = [[rng.choice([*known, f"rare{rng.random()}"]) for _ in range(rng.randrange(9))] for _ in range(400)]
    texts = ["".join(word + rng.choice(blanks) for word in row) for row in drawn] + ["", "the \ud800"]

    having = Counter(token for text in texts for token in set(words(text)))
    frequent = {token for token, many in having.items() if many >= 4}
    common = {token for token in frequent if having[token] >= 0.02 * len(texts) and len(token) > 1 and token[0] != "#"}
    first, numbers, _, _, _, frame, kept = text_labels(texts)
    for row, text in enumerate(texts):
        tokens, pieces = words(text), [words(piece) for piece in text.split()]
        assert first[row] == (content_key(tokens[0]) if tokens else 0)
        assert numbers[row] == sum(token[0] == "#" and len(token) > 1 for token in tokens)
        assert kept[row] == content_key(" ".join(token for token in tokens if token in frequent))
        of_pieces = [" ".join(token for token in piece if token in common) for piece in pieces]
        assert frame[row] == content_key(" ".join(one for one in dict.fromkeys(of_pieces) if one))


def test_a_text_with_half_a_surrogate_pair_has_a_key_and_strata():
    source = ListSource(many("a \ud800", "a \ud800 b"))
    assert len(set(source.keys().tolist())) == 2
    assert strata(source)
