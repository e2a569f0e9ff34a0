"""The figures of several answers to a problem, computed with all draws at once, are those of the installed verl."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from goldilocks.verl.validation import validation_figures

KNOWS_FAILURES = "expected_acc_counts" in inspect.signature(PPOTrainer._val_metrics_update).parameters
one = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(-1e6, 1e6), st.booleans().map(np.bool_))
problem = st.sampled_from(["ax", "ax", "ay", "ay", "az", "bx"])
answer = st.tuples(problem, one, st.floats(0, 1), st.sampled_from(["7", "8", "8", None]), st.integers(0, 4).map(bool))


@given(answers=st.lists(answer, min_size=8, max_size=25), with_acc=st.booleans(), voting=st.booleans())
@settings(max_examples=40)
def test_they_are_verls_to_the_last_digit(answers: list[tuple[Any, ...]], with_acc: bool, voting: bool) -> None:
    """Problems have different numbers of answers, some of which failed and are counted but have no values.

    verl fills up with None what the reward function returns for some, and a reward that it returns follows its scores.
    """
    expected = Counter((source, uid) for (source, uid), *_ in answers) if KNOWS_FAILURES else {}
    kept = [answer for answer in answers if answer[-1] or not expected]
    sources, uids = [source for (source, _), *_ in kept], [uid for (_, uid), *_ in kept]
    infos: dict[str, Any] = {"reward": [reward for _, _, reward, *_ in kept] + [0.5], "said": ["no number"] * len(kept)}
    infos |= {"pred": [vote for *_, vote, _ in kept]} if voting else {}
    infos |= {"acc": [acc for _, acc, *_ in kept]} if with_acc else {}
    asked = {"expected_acc_counts": expected} if expected else {}
    verls = PPOTrainer._val_metrics_update(None, sources, uids, infos, [], **asked)
    assert validation_figures(sources, uids, infos, expected) == verls


LEFT = ([1.0, float("nan")], [2**60, 2**60 + 1], [10**400, 1], [[1, 2], [3]], [np.float32(0.1), 0.1])


@pytest.mark.parametrize("infos", [*({"reward": values} for values in LEFT), {"reward": [0, 1], "pred": [1, "b"]}])
def test_votes_that_are_no_texts_and_what_is_no_plain_number_are_left_to_verl(infos: dict[str, Any]) -> None:
    assert validation_figures(["a", "a"], ["x", "x"], infos, {}) is None
