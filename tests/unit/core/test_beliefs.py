"""Beliefs: what a prompt's own rollouts and its strata say of it, whoever chose it and whatever ended its group."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from goldilocks import testing
from goldilocks.core import Beliefs, Collector, Limits, ListSource, Surplus
from goldilocks.core.allocators import Knapsack, Sequential
from goldilocks.core.beliefs import FIELDS
from goldilocks.core.effects import Division
from goldilocks.core.filters import Variance
from goldilocks.core.selectors import Frontier, Thompson
from goldilocks.hashing import content_key
from goldilocks.types import Group, OnExhausted, OnFull, Prompt, Rollout

SIZE = 400
KEYS = np.arange(100, 100 + SIZE, dtype=np.uint64)
EVERY = np.arange(SIZE)
FIVE = EVERY % 5
RATES = np.array([0.02, 0.1, 0.5, 0.9, 0.98])


def group(row: int, rewards: list[float], tokens: int = 10) -> Group:
    rollouts = tuple(Rollout("g0", index, reward, tokens) for index, reward in enumerate(rewards))
    return Group("g0", Prompt(int(KEYS[row]), row), rollouts, len(rewards), 0)


def by(*strata: np.ndarray) -> list[Division]:
    return [Division(one, np.unique(one).astype(np.uint64) + np.uint64(1)) for one in strata]


def rewards(rng: np.random.Generator, rate: float, n: int = 8) -> list[float]:
    return (rng.random(n) < rate).astype(float).tolist()


def until_success(rng: np.random.Generator, rate: float, n: int = 8) -> list[float]:
    """Two at a time, until one is right."""
    found: list[float] = []
    while len(found) < n and not any(found):
        found += rewards(rng, rate, 2)
    return found


def learn_by_chunks(beliefs: Beliefs, row: int, rewards: list[float], chunk: int) -> None:
    """Have the rollouts of a visit arrive, a chunk at a time."""
    rollouts = [Rollout("g0", index, reward, 10) for index, reward in enumerate(rewards)]
    for begin in range(0, len(rollouts), chunk):
        beliefs.learn(Group("g0", Prompt(row, row), rollouts[: begin + chunk]), begin)
    beliefs.record(Group("g0", Prompt(row, row), rollouts), len(rollouts))


def test_rewards_on_both_sides_of_the_threshold_that_differ_by_rounding_alone_do_not_differ() -> None:
    assert not Beliefs(KEYS).differs(group(0, [0.5, 0.7 - 0.2] * 2))


# -- one prompt --------------------------------------------------------------------------------------------------------


def test_ten_million_prompts_fit_in_sixty_four_bytes_each() -> None:
    beliefs = Beliefs(np.arange(1_000, dtype=np.uint64))
    columns = [beliefs.keys, *(getattr(beliefs, name) for name in FIELDS)]
    assert sum(column.nbytes for column in columns) / len(beliefs) <= 64


def test_a_prompt_never_seen_is_believed_to_be_anything() -> None:
    beliefs = Beliefs(np.arange(100_000, dtype=np.uint64))
    rows = np.arange(len(beliefs))
    draws = beliefs.draw(rows, np.random.default_rng(0))
    assert_allclose(beliefs.pass_rate(rows), 0.5)
    assert_allclose(np.quantile(draws, [0.1, 0.5, 0.9]), [0.1, 0.5, 0.9], atol=0.01)


def test_rollouts_of_a_prompt_are_counted_and_those_before_its_training_alone_count_less() -> None:
    beliefs = Beliefs(KEYS)
    beliefs.record(group(0, [1, 1, 1, 0]))
    assert beliefs.posterior_of(0) == pytest.approx((4, 2))
    for _ in range(300):  # where nothing is trained nothing is forgotten
        beliefs.trained([])
        beliefs.record(group(1, [0, 0]))
    assert beliefs.posterior_of(0) == pytest.approx((4, 2))
    beliefs.trained([group(0, [1, 1, 1, 0])])
    a, b = beliefs.posterior_of(0)
    assert 2 < a + b < 6
    assert a / b == pytest.approx(2.0, abs=0.2)
    beliefs.record(group(0, [0, 0]))
    assert beliefs.posterior_of(0)[1] > b + 1.9


def test_one_prompt_and_many_have_the_same_posterior_and_cost() -> None:
    rng = np.random.default_rng(0)
    beliefs = Beliefs(KEYS, divisions=by(FIVE, EVERY % 3))
    for row in range(150):
        visit = group(row, rewards(rng, RATES[FIVE[row]]))
        beliefs.record(visit)
        beliefs.trained([visit])
    one_by_one = np.array([beliefs.posterior_of(row) for row in range(SIZE)]).T
    assert_allclose(np.stack(beliefs.posterior(EVERY)), one_by_one, rtol=1e-5)
    assert_allclose(beliefs.expected_cost(EVERY), [beliefs.expected_cost_of(row) for row in range(SIZE)], rtol=1e-5)


def test_draws_are_from_the_beta_posterior() -> None:
    beliefs = Beliefs(np.arange(50_000, dtype=np.uint64))
    beliefs.positives[:], beliefs.negatives[:] = 6, 2
    draws = beliefs.draw(np.arange(50_000), np.random.default_rng(0))
    assert draws.mean() == pytest.approx(0.7, abs=0.005)
    assert draws.var() == pytest.approx(7 * 3 / (100 * 11), abs=0.001)


def test_streaks_count_visits_whose_rewards_did_not_differ() -> None:
    beliefs = Beliefs(KEYS)
    for seen, streak in (([1, 1], 1), ([0, 0], 2), ([1, 0], 0), ([1], 1)):
        beliefs.record(group(0, seen))
        assert beliefs.streak[0] == streak


def test_a_prompt_never_seen_is_expected_to_be_as_long_as_others_of_its_strata() -> None:
    beliefs = Beliefs(KEYS, divisions=by(FIVE))
    for row in range(200):
        beliefs.record(group(row, [1, 0], tokens=400 if FIVE[row] == 4 else 80))
    assert_allclose(beliefs.expected_cost(np.array([300, 304])), [80, 400], rtol=0.1)


def test_half_of_the_visits_are_forgotten_with_each_epoch() -> None:
    beliefs = Beliefs(KEYS[:64])
    beliefs.record(group(0, [1, 0]))
    for row in [*range(1, 64)] * 2:
        beliefs.record(group(row, [1, 0]))
    assert beliefs.recent[0] == pytest.approx(0.25, rel=0.1)
    assert beliefs.visits[0] == 1


def test_a_group_that_was_given_up_is_learnt_from_and_is_no_visit() -> None:
    beliefs = Beliefs(KEYS)
    beliefs.learn(group(0, [1.0] * 3))
    assert beliefs.posterior_of(0) == pytest.approx((4, 1))
    assert beliefs.visits[0] == 0


# -- strata ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ends", "chunk"), [(rewards, 8), (until_success, 2)])
def test_a_prompt_never_tried_is_believed_like_those_of_its_stratum_whatever_ended_their_groups(ends, chunk) -> None:
    many = np.arange(2_000)
    rng, beliefs = np.random.default_rng(0), Beliefs(many.astype(np.uint64), divisions=by(many % 5))
    for row in range(1_995):
        learn_by_chunks(beliefs, row, ends(rng, RATES[row % 5]), chunk)
        if row % 16 == 0:
            beliefs.trained([])
    assert_allclose(beliefs.pass_rate(np.arange(1_995, 2_000)), RATES, atol=0.03)


def test_strata_whose_groups_stop_at_a_success_do_not_seem_to_rise_while_they_are_trained() -> None:
    """Successes end a group soon after an update, failures late before the next one."""
    rates, many, rng = np.array([0.02, 0.05, 0.1, 0.3]), np.arange(2_400), np.random.default_rng(0)
    beliefs, believed = Beliefs(many.astype(np.uint64), divisions=by(many % 4)), []
    for update in range(36):
        open_groups = [Group("g0", Prompt(row, row), []) for row in range(64 * update, 64 * update + 64)]
        groups = list(open_groups)
        while open_groups:  # every group is asked for its next chunk, those with a success are complete
            for one in open_groups:
                learnt = len(one)
                right = rewards(rng, rates[one.prompt.index % 4], 8 if learnt else 2)
                one.rollouts.extend(Rollout("g0", learnt + index, reward, 10) for index, reward in enumerate(right))
                beliefs.learn(one, learnt)
            open_groups = [one for one in open_groups if len(one) < 64 and not beliefs.passes(one)]
        beliefs.trained(groups)
        believed.append(beliefs.pass_rate(many[-4:]))
    assert_allclose(np.mean(believed[18:], axis=0), rates, atol=0.06)


def test_strata_are_remembered_whoever_chooses() -> None:
    """No visit is marked as fair to learn from: a selector of the user's own need not know of that."""
    rng, beliefs = np.random.default_rng(1), Beliefs(KEYS, divisions=by(FIVE))
    for row in range(200):
        beliefs.record(group(row, rewards(rng, RATES[FIVE[row]])))
    for _ in range(250):  # only one stratum is chosen and trained from here on
        visit = group(2, rewards(rng, 0.5))
        beliefs.record(visit)
        beliefs.trained([visit])
    assert_allclose(beliefs.pass_rate(np.array([395, 396, 398, 399])), RATES[[0, 1, 3, 4]], atol=0.12)


@pytest.mark.parametrize("concentration", [2.0, 8.0, 32.0])
def test_how_alike_the_prompts_of_a_stratum_are_is_estimated(concentration: float) -> None:
    rng, beliefs = np.random.default_rng(3), Beliefs(KEYS, divisions=by(EVERY % 8))
    for row, rate in enumerate(rng.beta(concentration * 0.3, concentration * 0.7, SIZE)):
        beliefs.record(group(row, rewards(rng, rate, 16)))
    assert beliefs.concentration == pytest.approx(concentration, rel=0.5)


def test_strata_that_say_nothing_fade() -> None:
    rng, beliefs = np.random.default_rng(5), Beliefs(KEYS, divisions=by(EVERY // 20, FIVE))
    for row in range(395):
        beliefs.record(group(row, rewards(rng, RATES[FIVE[row]])))
        if row % 16 == 0:
            beliefs.trained([])
    _, nothing, told = beliefs.rates.state_dict()["spread"]
    assert nothing < 0.2 * told


def test_a_stratum_never_seen_is_like_the_others_of_its_other_divisions() -> None:
    rng, beliefs = np.random.default_rng(7), Beliefs(KEYS, divisions=by(FIVE, EVERY // 40))
    for row in range(200):
        beliefs.record(group(row, rewards(rng, RATES[FIVE[row]])))
    assert_allclose(beliefs.pass_rate(np.arange(390, 395)), RATES, atol=0.12)


def test_a_stratum_that_rises_with_its_training_is_followed() -> None:
    rng, beliefs, rate = np.random.default_rng(2), Beliefs(KEYS, divisions=by(EVERY % 4)), 0.1
    far = []
    for step in range(300):
        visit = group(4 * int(rng.integers(100)), rewards(rng, rate))
        beliefs.record(visit)
        beliefs.trained([visit])
        rate = min(0.9, rate + 0.003)
        if step >= 100:
            far.append(beliefs.pass_rate(np.arange(0, SIZE, 4)).mean() - rate)
    assert abs(np.mean(far)) < 0.05
    assert np.mean(np.abs(far)) < 0.1


def test_a_draw_of_a_stratum_is_the_same_for_all_its_prompts() -> None:
    beliefs = Beliefs(KEYS, divisions=by(FIVE))
    for row in range(200):
        beliefs.record(group(row, [1, 0, 1, 0, 1, 0, 1, 0]))
    a, b = beliefs.posterior(EVERY, np.random.default_rng(0))
    unseen = (a / (a + b))[200:].reshape(-1, 5)
    assert_allclose(unseen, np.broadcast_to(unseen[0], unseen.shape))
    assert np.ptp(unseen[0]) > 0


def test_a_prompts_own_rollouts_outweigh_its_stratum_in_the_end() -> None:
    beliefs = Beliefs(KEYS, divisions=by(EVERY // 200))
    beliefs.negatives[:200] = 300.0
    assert beliefs.draw(EVERY[:200], np.random.default_rng(5)).max() < 0.1
    assert_allclose(beliefs.pass_rate(EVERY[200:]), 0.5)


def test_an_oracle_believes_what_it_is_told() -> None:
    names = [f"val/level/{level}/acc" for level in range(5)]
    beliefs = Beliefs(KEYS, divisions=by(FIVE), names=names)
    beliefs.tell({"val/level/2/acc": 0.7, "val/level/9/acc": 0.1, "other": 1.0})
    assert beliefs.pass_rate(np.array([397]))[0] == pytest.approx(0.7, abs=0.01)
    a, b = beliefs.posterior_of(397)
    assert a / (a + b) == pytest.approx(0.7, abs=0.01)
    loaded = Beliefs(KEYS, divisions=by(FIVE), names=names)
    loaded.load_state_dict(beliefs.state_dict())
    assert_allclose(loaded.pass_rate(EVERY), beliefs.pass_rate(EVERY))


# -- how good they are -------------------------------------------------------------------------------------------------


def test_skill_is_what_beliefs_forecast_better_than_the_mean() -> None:
    skills = []
    for divisions in (by(FIVE), by(EVERY % 20)):
        rng, beliefs = np.random.default_rng(9), Beliefs(KEYS, divisions=divisions)
        for row in rng.permutation(SIZE):
            beliefs.record(
                group(row, rewards(rng, RATES[(row // 20) % 5 if divisions[0].keys[-1] > 10 else FIVE[row]]))
            )
        skills.append(beliefs.metrics()["belief/skill"])
    assert skills[0] > 0.3
    assert -0.1 < skills[1] < 0.1
    assert Beliefs(KEYS).metrics() == {}, "a flat prior forecasts nothing"


# -- state -------------------------------------------------------------------------------------------------------------


def test_saved_beliefs_hold_only_what_was_visited_and_load_by_key() -> None:
    beliefs = Beliefs(KEYS[:3])
    beliefs.record(group(2, [1, 0]))
    state = beliefs.state_dict()
    assert len(state["keys"]) == 1
    moved = Beliefs(np.array([KEYS[2], 7], dtype=np.uint64))
    moved.load_state_dict(state)
    assert moved.visits.tolist() == [1, 0]


def test_strata_are_found_by_key_in_data_of_another_order() -> None:
    rng, beliefs = np.random.default_rng(1), Beliefs(KEYS, divisions=by(FIVE))
    for row in range(300):
        visit = group(row, rewards(rng, RATES[FIVE[row]]))
        beliefs.record(visit)
        beliefs.trained([visit])
    other = rng.permutation(SIZE)
    moved = Beliefs(KEYS[other], divisions=[Division(FIVE[other], by(FIVE)[0].keys)])
    moved.load_state_dict(beliefs.state_dict())
    assert_allclose(moved.pass_rate(EVERY), beliefs.pass_rate(other), rtol=1e-6)
    same = Beliefs(KEYS, divisions=by(FIVE))
    state = beliefs.state_dict()
    same.load_state_dict(state)
    beliefs.record(group(0, [1, 0]))
    beliefs.trained([])
    np.testing.assert_equal(same.state_dict(), state, "a saved state does not change when the run goes on")


@pytest.mark.parametrize("strata", [0, 2])
@pytest.mark.parametrize(("selector", "allocator"), [(Thompson, Knapsack), (Frontier, Sequential)])
def test_a_run_that_is_cut_saved_and_loaded_goes_on_the_same(selector: type, allocator: type, strata: int) -> None:
    def make() -> Collector:
        source = ListSource([f"prompt {index}" for index in range(testing.PROMPTS)])
        rows = np.arange(testing.PROMPTS)
        return Collector(
            source,
            selector(),
            allocator(4) if allocator is Sequential else allocator(4, max_n=8),
            Variance(),
            target_groups=8,
            beliefs=Beliefs(source.keys(), divisions=by(rows // 20, rows % 7)[:strata]),
            limits=Limits(max_num_gen_batches=20, on_exhausted=OnExhausted.BACKFILL),
            surplus=Surplus(on_full=OnFull.REQUEUE),
        )

    testing._check(make)


def test_a_content_key_is_the_same_in_every_process() -> None:
    assert content_key("2+2=") == 3250715836379494542
    assert content_key({"a": 1, "b": [2]}) == content_key({"b": [2], "a": 1})
