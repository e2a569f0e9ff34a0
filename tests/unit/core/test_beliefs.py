"""Beliefs."""

from __future__ import annotations

import numpy as np
import pytest

from goldilocks.core import Beliefs
from goldilocks.hashing import content_key
from goldilocks.types import Group, Prompt, Rollout


def visit(beliefs: Beliefs, row: int, rewards: list[float], tokens: int = 10, informative: bool = True) -> None:
    rollouts = [Rollout("g0", index, reward, tokens) for index, reward in enumerate(rewards)]
    beliefs.record(Group("g0", Prompt(int(beliefs.keys[row]), row), rollouts), informative=informative, step=3)


def test_ten_million_prompts_fit_in_sixty_four_bytes_each() -> None:
    beliefs = Beliefs(np.arange(1_000, dtype=np.uint64))
    assert beliefs.nbytes / len(beliefs) <= 64


def test_a_prompt_never_seen_is_believed_to_be_anything() -> None:
    beliefs = Beliefs(np.arange(100_000, dtype=np.uint64))
    rows = np.arange(len(beliefs))
    draws = beliefs.draw(rows, np.random.default_rng(0))
    assert beliefs.pass_rate(rows).tolist() == [0.5] * len(beliefs)
    assert np.quantile(draws, [0.1, 0.5, 0.9]) == pytest.approx([0.1, 0.5, 0.9], abs=0.01)


def test_beliefs_follow_what_is_seen_and_forget_what_was() -> None:
    beliefs = Beliefs(np.arange(2, dtype=np.uint64), forgetting=0.5)
    visit(beliefs, 0, [1, 1, 1, 0])
    assert beliefs.pass_rate(np.array([0]))[0] == pytest.approx(4 / 6)
    visit(beliefs, 0, [0, 0])
    assert beliefs.pass_rate(np.array([0]))[0] == pytest.approx(2.5 / 6)  # 1 + 1.5 of 2 + 1.5 + 2.5


def test_draws_are_from_the_beta_posterior() -> None:
    beliefs = Beliefs(np.arange(50_000, dtype=np.uint64))
    beliefs.positives[:], beliefs.negatives[:] = 6, 2
    draws = beliefs.draw(np.arange(50_000), np.random.default_rng(0))
    assert draws.mean() == pytest.approx(0.7, abs=0.005)
    assert draws.var() == pytest.approx(7 * 3 / (100 * 11), abs=0.001)


def test_streaks_count_visits_without_variance_and_end_with_one_that_has_it() -> None:
    beliefs = Beliefs(np.arange(1, dtype=np.uint64))
    for informative, streak in ((False, 1), (False, 2), (True, 0), (False, 1)):
        visit(beliefs, 0, [1, 1], informative=informative)
        assert beliefs.streak[0] == streak


def test_an_unseen_prompt_is_expected_to_be_as_long_as_others() -> None:
    beliefs = Beliefs(np.arange(2, dtype=np.uint64))
    visit(beliefs, 0, [1, 0], tokens=80)
    assert beliefs.expected_tokens(np.array([0, 1])).tolist() == [80, 80]


def test_saved_beliefs_hold_only_what_was_visited_and_load_by_key() -> None:
    beliefs = Beliefs(np.array([10, 20, 30], dtype=np.uint64))
    visit(beliefs, 2, [1, 0])
    state = beliefs.state_dict()
    assert len(state["keys"]) == 1
    moved = Beliefs(np.array([30, 40], dtype=np.uint64))
    moved.load_state_dict(state)
    assert moved.visits.tolist() == [1, 0]


def test_a_content_key_is_the_same_in_every_process() -> None:
    assert content_key("2+2=") == 3250715836379494542
    assert content_key({"a": 1, "b": [2]}) == content_key({"b": [2], "a": 1})


def test_forgetting_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"goldilocks.forgetting=1.5 is not accepted"):
        Beliefs(np.arange(1, dtype=np.uint64), forgetting=1.5)
