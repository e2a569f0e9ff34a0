"""Priors: prompts share what they have in common, strata that say nothing fade, and all of it survives a restart."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from goldilocks import testing
from goldilocks.core import Beliefs, Collector, Limits, ListSource, Surplus
from goldilocks.core.allocators import Knapsack
from goldilocks.core.beliefs import BeliefScore
from goldilocks.core.filters import Variance
from goldilocks.core.priors import Flat, Oracle, Prior, Strata
from goldilocks.core.selectors import Thompson
from goldilocks.core.source import PromptOrder
from goldilocks.types import Group, OnExhausted, OnFull, Prompt, Rollout

SIZE = 400
KEYS = np.arange(100, 100 + SIZE, dtype=np.uint64)
EVERY = np.arange(SIZE)


def group(row: int, rewards: list[float], version: int = 0) -> Group:
    rollouts = tuple(Rollout("g0", index, reward, 1) for index, reward in enumerate(rewards))
    return Group("g0", Prompt(int(KEYS[row]), row), rollouts, len(rewards), version)


class Run:
    """Beliefs with a prior; ``step`` chooses, rolls out, and tells what came of it."""

    def __init__(self, prior: Prior, rates: np.ndarray, seed: int = 5) -> None:
        self.rates = rates
        self.pool = PromptOrder(SIZE, seed=1, repeat=True)
        self.beliefs = Beliefs(KEYS, prior=prior)
        self.selector = Thompson()
        self.rng = np.random.default_rng(seed)

    def step(self, version: int, k: int = 32, n: int = 8) -> np.ndarray:
        rows = self.selector.choose(self.pool, self.beliefs, k, self.rng)
        for row in rows.tolist():
            self.visit(row, version, n)
        return rows

    def visit(self, row: int, version: int = 0, n: int = 8) -> None:
        rewards = (self.rng.random(n) < self.rates[row]).astype(float).tolist()
        self.beliefs.record(group(row, rewards, version), informative=len(set(rewards)) > 1, step=version)


# -- strata ------------------------------------------------------------------------------------------------------------

FIVE = EVERY % 5
RATES = np.array([0.0, 0.02, 0.5, 0.9, 1.0])[FIVE]


def test_a_prompt_never_tried_is_believed_to_be_like_those_of_its_stratum():
    run = Run(Strata([[FIVE]]), RATES)
    for row in range(100):
        run.visit(row)
    assert_allclose(run.beliefs.pass_rate(np.arange(395, 400)), [0.0, 0.02, 0.5, 0.9, 1.0], atol=0.06)


def test_worth_is_what_prompts_of_one_stratum_have_in_common():
    rng, found = np.random.default_rng(3), []
    for concentration in (2.0, 8.0, 32.0):
        rates = rng.beta(concentration * 0.3, concentration * 0.7, SIZE)
        run = Run(Strata([[EVERY % 8]]), rates)
        for row in EVERY.tolist():
            run.visit(row, n=16)
        run.beliefs.pass_rate(EVERY)
        found.append(run.beliefs.prior.worth)
    assert_allclose(found, [2.0, 8.0, 32.0], rtol=0.4)


def test_worth_stays_within_its_bounds():
    for passes, worth in ((np.full(SIZE, 4), 64.0), (8 * (EVERY % 7 == 0), 1.0)):
        beliefs = Beliefs(KEYS, prior=Strata([[EVERY % 4]]))
        for row in EVERY.tolist():
            beliefs.record(group(row, [1.0] * passes[row] + [0.0] * (8 - passes[row])), informative=True, step=1)
        beliefs.pass_rate(EVERY)
        assert beliefs.prior.worth == pytest.approx(worth)


def test_strata_that_say_nothing_become_the_mean():
    rates = np.random.default_rng(1).permutation(np.linspace(0, 1, SIZE) ** 4)
    run = Run(Strata([[EVERY % 10]]), rates)
    for row in range(200):
        run.visit(row)
    seen = np.array([rates[row:200:10].mean() for row in range(10)])
    believed = run.beliefs.pass_rate(np.arange(200, 210))
    assert believed.std() < 0.7 * seen.std()
    assert_allclose(believed.mean(), seen.mean(), atol=0.02)


def test_a_small_stratum_leans_on_the_mean_of_all():
    strata = np.where(EVERY == 399, 1, 0)
    run = Run(Strata([[strata]]), np.full(SIZE, 0.2))
    for row in range(200):
        run.visit(row)
    assert_allclose(run.beliefs.pass_rate(np.array([399])), 0.2, atol=0.1)


def test_a_stratum_never_seen_leans_on_the_one_it_is_part_of():
    coarse = (EVERY % 2).astype(int)
    fine = 10 * coarse + EVERY % 10
    run = Run(Strata([[coarse, fine]]), np.where(coarse, 0.8, 0.1))
    for row in EVERY[EVERY % 10 < 6].tolist():
        run.visit(row)
    unseen = np.array([8, 9])  # of an even stratum and of an odd one
    assert_allclose(run.beliefs.pass_rate(unseen), [0.1, 0.8], atol=0.1)


def test_a_draw_of_a_stratum_is_the_same_for_all_its_prompts():
    run = Run(Strata([[FIVE]]), RATES)
    for row in range(100):
        run.visit(row)
    run.beliefs.pass_rate(EVERY)
    a, b = run.beliefs.prior.draw(EVERY, run.rng)
    rates = a / (a + b)
    assert len(np.unique(rates)) == 5
    assert all(len(np.unique(rates[stratum == FIVE])) == 1 for stratum in range(5))


def test_what_strata_were_is_forgotten_by_updates():
    strata = EVERY // 200
    run = Run(Strata([[strata]], forgetting=0.9), np.ones(SIZE))
    for row in range(100):
        run.visit(row, version=0)
    run.rates = np.zeros(SIZE)
    for row in range(100, 110):
        run.visit(row, version=60)
    assert run.beliefs.pass_rate(np.array([199]))[0] < 0.1, "what was right sixty updates ago counts for nothing"


@pytest.mark.parametrize("updates", [7_000, 100_000])
def test_a_stratum_that_was_seen_very_long_ago_is_as_if_never_seen(updates):
    run = Run(Strata([[EVERY // 200, EVERY // 40]], forgetting=0.9), np.full(SIZE, 0.5))
    for row in range(20):
        run.visit(row, version=0)
    for row in range(200, 220):
        run.visit(row, version=updates)
    never, long_ago = run.beliefs.pass_rate(np.array([100, 30]))
    assert long_ago == pytest.approx(never)
    assert np.isfinite(run.beliefs.draw(EVERY, run.rng)).all()


def test_the_rollouts_of_one_prompt_do_not_speak_for_its_stratum():
    run = Run(Strata([[EVERY // 200]]), np.where(EVERY == 0, 1.0, 0.0))
    for row in range(20):
        run.visit(row)
    for _ in range(50):
        run.visit(0)
    assert run.beliefs.pass_rate(np.array([199]))[0] < 0.2
    assert run.beliefs.pass_rate(np.array([0]))[0] > 0.9


def test_strata_are_a_function_of_the_counts_of_beliefs():
    run = Run(Strata([[FIVE]]), RATES)
    for version in range(1, 4):
        run.step(version)
    moved = Beliefs(KEYS[::-1].copy(), prior=Strata([[FIVE[::-1].copy()]]))
    moved.load_state_dict(run.beliefs.state_dict())
    assert_allclose(moved.pass_rate(EVERY)[::-1], run.beliefs.pass_rate(EVERY), rtol=1e-5)


def test_of_several_divisions_the_one_that_forecasts_counts():
    noise = np.random.default_rng(0).integers(0, 6, SIZE)
    run = Run(Strata([[noise], [FIVE], [noise, 10 * noise + EVERY % 2]]), RATES)
    for row in range(100):
        run.visit(row)
    run.beliefs.pass_rate(EVERY)
    assert run.beliefs.prior.weights.argmax() == 2, "behind the mean of all and the first"
    assert run.beliefs.prior.weights.max() > 0.99
    assert run.beliefs.metrics()["belief/strata"] == 5


def test_visits_that_are_owed_to_a_prompt_s_own_rollouts_do_not_make_it_speak_for_others():
    run = Run(Strata([[EVERY // 200]], forgetting=0.9), np.where(EVERY % 20 == 0, 0.5, 0.0))
    for row in range(100):
        run.visit(row, version=0)
    for row in (0, 20, 40, 60, 80):
        run.visit(row, version=20)
    assert run.beliefs.pass_rate(np.array([199]))[0] < 0.1, "all hundred are as old as each other"


def test_of_very_many_prompts_the_latest_draws_count(monkeypatch):
    monkeypatch.setattr("goldilocks.core.priors.MOST", 50)
    run = Run(Strata([[EVERY // 200]], forgetting=1.0), np.where(EVERY < 100, 1.0, 0.0))
    for row in range(150):
        run.visit(row, version=row)
    assert run.beliefs.pass_rate(np.array([199]))[0] < 0.1


def test_strata_that_are_not_nested_are_refused():
    with pytest.raises(ValueError, match="each stratum within one of the depth above"):
        Strata([[EVERY % 2, EVERY % 3]])


def test_an_oracle_believes_what_it_is_told_and_what_visits_show_of_the_rest():
    names = [f"val/level/{level}/acc" for level in FIVE]
    run = Run(Oracle(names), RATES)
    run.beliefs.prior.tell({"val/level/2/acc": 0.7, "val/level/9/acc": 0.1, "other": 1.0})
    for row in range(100):
        run.visit(row)
    assert_allclose(run.beliefs.pass_rate(np.arange(395, 400)), [0.0, 0.02, 0.7, 0.9, 1.0], atol=0.06)
    loaded = Beliefs(KEYS, prior=Oracle(names))
    loaded.load_state_dict(run.beliefs.state_dict())
    assert_allclose(loaded.pass_rate(EVERY), run.beliefs.pass_rate(EVERY))


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_prompts_near_the_target_are_chosen_also_those_never_tried():
    easy = np.random.default_rng(0).standard_normal(SIZE)
    rates = 1 / (1 + np.exp(0.5 - 2.5 * easy))
    nearer, skills = [], []
    for seed in range(8):  # one run alone is a matter of luck
        run = Run(Strata([[np.digitize(easy, [-1, -0.3, 0.3, 1])]]), rates, seed)
        for version in range(1, 5):
            run.step(version)
        unseen = np.flatnonzero(run.beliefs.visits == 0)
        fresh = np.intersect1d(np.concatenate([run.step(5), run.step(6)]), unseen)
        assert len(fresh) > 4
        nearer.append(abs(rates[fresh] - 0.5).mean() / abs(rates[unseen] - 0.5).mean())
        skills.append(run.beliefs.metrics()["belief/skill"])
    assert np.mean(nearer) < 0.75
    assert np.mean(skills) > 0.1


def test_a_tenth_of_every_choice_is_uniform_whatever_its_size():
    run = Run(Strata([[FIVE]]), RATES)
    run.beliefs.positives[:40], run.beliefs.negatives[:40] = 1e7, 1e7  # any choice but a uniform one takes these
    for size in (1, 4, 32):
        chosen = np.concatenate(
            [run.selector.choose(run.pool, run.beliefs, size, run.rng) for _ in range(1600 // size)]
        )
        assert np.mean(chosen >= 40) == pytest.approx(0.1 * 360 / 400, abs=0.025)


def test_beliefs_are_scored_on_uniform_draws_alone():
    run = Run(Strata([[FIVE]]), RATES)
    probed = run.beliefs.probe(np.array([7, 8, 9]))
    for row in range(20):
        run.visit(row)
    assert probed.tolist() == [7, 8, 9]
    assert run.beliefs.metrics()["belief/scored"] == 3


@pytest.mark.parametrize("seed", range(3))
def test_strata_that_say_nothing_are_hardly_worse_than_the_mean(seed):
    rng = np.random.default_rng(seed)
    run = Run(Strata([[rng.integers(0, 20, SIZE)]]), rng.beta(0.1, 1.2, SIZE))
    for version in range(1, 60):
        run.step(version)
        if run.beliefs.score.groups >= 64:
            assert run.beliefs.metrics()["belief/skill"] > -0.02


def test_many_divisions_that_say_nothing_are_hardly_worse_than_the_mean_from_the_start():
    lowest = []
    for seed in range(26):
        rng = np.random.default_rng(seed)
        fine = [rng.integers(0, 60, SIZE) for _ in range(5)]
        run = Run(Strata([[one % 4, one % 12, one] for one in fine]), rng.beta(0.2, 0.8, SIZE), seed)
        for version in range(1, 9):
            for row in run.beliefs.probe(run.pool.next(32)).tolist():
                run.visit(row, version)
            if run.beliefs.score.groups >= 64:
                lowest.append(run.beliefs.score.skill)
    assert min(lowest) > -0.02


def test_the_mean_learns_nothing_from_groups_that_were_drawn_with_the_one_it_is_scored_on():
    beliefs = Beliefs(KEYS)
    beliefs.probe(np.arange(16))
    for row in range(16):
        beliefs.record(group(row, [0.0] * 8), informative=False, step=1)
    assert beliefs.score.skill == 0, "of the first batch both know nothing"
    beliefs.probe(np.array([20]))
    beliefs.record(group(20, [0.0] * 8), informative=False, step=1)
    assert beliefs.score.skill < 0, "now uniform draws have shown that little is right"


def test_what_was_right_long_ago_does_not_count_for_ever():
    score = BeliefScore()
    for _ in range(32):
        score.add(0.9, 0.5, 8, 8)
    assert score.skill > 0.8
    for _ in range(3000):
        score.add(0.9, 0.5, 0, 8)
    assert score.skill < 0


# -- a run -------------------------------------------------------------------------------------------------------------


def test_a_prompt_s_own_rollouts_outweigh_its_stratum_in_the_end():
    run = Run(Strata([[EVERY // 200]]), np.full(SIZE, 0.5))
    run.beliefs.negatives[:200] = 300.0
    drawn = run.beliefs.draw(EVERY, run.rng)
    assert drawn[:200].max() < 0.1
    assert drawn[200:].mean() > 0.3


def test_a_group_that_was_given_up_is_scored_and_is_no_visit():
    beliefs = Beliefs(KEYS, prior=Strata([[FIVE]]))
    beliefs.probe(np.array([0]))
    beliefs.record_unjudged(group(0, [1.0] * 3))
    assert beliefs.metrics()["belief/scored"] == 1
    assert beliefs.visits[0] == 0


@pytest.mark.parametrize("prior", ["flat", "strata"])
def test_a_run_that_is_cut_saved_and_loaded_goes_on_the_same(prior):
    def make() -> Collector:
        source = ListSource([f"prompt {index}" for index in range(testing.PROMPTS)])
        rows = np.arange(testing.PROMPTS)
        priors = {"flat": Flat(), "strata": Strata([[rows // 20, rows // 5], [rows % 7]])}
        beliefs = Beliefs(source.keys(), prior=priors[prior])
        limits = Limits(max_num_gen_batches=20, on_exhausted=OnExhausted.BACKFILL)
        surplus = Surplus(on_full=OnFull.REQUEUE)
        return Collector(
            source,
            Thompson(),
            Knapsack(4, max_n=8),
            Variance(),
            target_groups=8,
            beliefs=beliefs,
            limits=limits,
            surplus=surplus,
        )

    testing._check(make)


def test_a_flat_prior_has_no_metrics():
    assert Beliefs(KEYS, prior=Flat()).metrics() == {}


def test_a_parameter_out_of_range_is_named():
    with pytest.raises(ValueError, match=r"goldilocks\.prior_kwargs\.forgetting=0"):
        Strata([[FIVE]], forgetting=0)
