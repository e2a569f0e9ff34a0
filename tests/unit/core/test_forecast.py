"""The forecast: it learns from features, is uniform until it is worth something, and survives a restart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from goldilocks.core import Ledger
from goldilocks.core.forecast_score import ENOUGH, ForecastScore
from goldilocks.core.logistic import Logistic, sigmoid
from goldilocks.core.pool import Pool
from goldilocks.core.selectors import Forecast, Uniform
from goldilocks.testing import check_selector
from goldilocks.types import Group, Prompt, Rollout

SIZE = 400


def world(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features, and pass rates that follow from them."""
    rng = np.random.default_rng(seed)
    x = np.hstack([np.ones((SIZE, 1)), rng.standard_normal((SIZE, 3))])
    return x, sigmoid(x @ np.array([-0.5, 2.5, 0.0, 0.0]))


class Run:
    """A selector, its pool and ledger; ``step`` chooses, rolls out, and tells what came of it."""

    def __init__(self, features: np.ndarray, rates: np.ndarray, **params: float) -> None:
        self.rates = rates
        self.pool = Pool(SIZE, seed=1, repeat=True)
        self.ledger = Ledger(np.arange(100, 100 + SIZE, dtype=np.uint64))
        self.selector = Forecast(**params)
        self.selector.use_features(features)
        self.rng = np.random.default_rng(5)

    def step(self, version: int, k: int = 32, n: int = 8) -> np.ndarray:
        rows = self.selector.choose(self.pool, self.ledger, k, self.rng)
        for number, row in enumerate(rows.tolist()):
            rewards = (self.rng.random(n) < self.rates[row]).astype(float)
            uid = f"g{1000 * version + number}"
            rollouts = tuple(Rollout(uid, index, reward, 1) for index, reward in enumerate(rewards))
            group = Group(uid, Prompt(int(self.ledger.keys[row]), row), rollouts, n, version)
            self.ledger.record(group, informative=len(set(rewards)) > 1, step=version)
            self.selector.learn(group, informative=len(set(rewards)) > 1)
        return rows


def test_weights_are_found_and_uncertainty_shrinks_with_what_was_seen():
    x, rates = world()
    model = Logistic(x.shape[1])
    before = np.linalg.inv(model.precision).diagonal()
    model.learn(x, 20 * rates, np.full(SIZE, 20.0))
    assert_allclose(model.mean, [-0.5, 2.5, 0.0, 0.0], atol=0.05)
    assert (np.linalg.inv(model.precision).diagonal() < before / 100).all()


def test_learning_in_parts_comes_to_what_learning_at_once_does():
    x, rates = world()
    passes, trials = 8 * rates, np.full(SIZE, 8.0)
    whole, parts = Logistic(4), Logistic(4)
    whole.learn(x, passes, trials)
    for part in np.array_split(np.arange(SIZE), 8):
        parts.learn(x[part], passes[part], trials[part])
    assert_allclose(parts.mean, whole.mean, atol=0.15)


@given(st.integers(1, 200))
def test_forgetting_returns_to_the_prior_and_never_sharpens(updates):
    x, rates = world()
    model = Logistic(4, prior=0.5, forgetting=0.9)
    model.learn(x, 8 * rates, np.full(SIZE, 8.0))
    sharp = np.linalg.eigvalsh(model.precision)
    model.forget(updates)
    assert (np.linalg.eigvalsh(model.precision) <= sharp + 1e-9).all()
    model.forget(10_000)
    assert_allclose(model.precision, 0.5 * np.eye(4), atol=1e-9)
    assert_allclose(model.mean, 0, atol=1e-6)


@given(st.lists(st.tuples(st.integers(0, 8), st.floats(-1e3, 1e3)), min_size=1, max_size=12))
def test_whatever_is_observed_the_weights_stay_finite(observed):
    x = np.array([[1.0, value] for _, value in observed])
    model = Logistic(2)
    for _ in range(3):
        model.learn(x, np.array([passes for passes, _ in observed], float), np.full(len(x), 8.0))
    assert np.isfinite(model.mean).all()
    assert ((model.predict(x) >= 0) & (model.predict(x) <= 1)).all()


def add(score: ForecastScore, *groups: tuple[float, float, float]) -> None:
    """Groups that came in together: forecast, passes, trials."""
    score.add(*np.array(groups, float).T)


def test_the_mean_learns_nothing_from_groups_that_come_in_with_the_one_it_is_scored_on():
    score = ForecastScore()
    add(score, *[(0.5, 0, 8)] * 16)
    assert score.skill == 0, "of the first batch both know nothing"
    add(score, (0.5, 0, 8))
    assert score.skill < 0, "now the mean knows that little is right"


def test_a_forecast_is_better_only_after_enough_groups_and_only_if_its_loss_is_lower():
    score = ForecastScore()
    for _ in range(ENOUGH // 2):
        assert not score.better
        add(score, (0.9, 8, 8), (0.1, 0, 8))
    assert score.better
    assert score.skill > 0.8
    for _ in range(3000):
        add(score, (0.9, 0, 8), (0.1, 8, 8))
    assert not score.better, "what was right long ago does not count for ever"


def test_with_features_that_say_something_it_comes_to_choose_prompts_near_the_target():
    run = Run(*world())
    means = [abs(run.rates[run.step(version)] - 0.5).mean() for version in range(1, 13)]
    assert run.selector.metrics()["selector/forecast_in_use"] == 1
    assert means[-1] < 0.75 * means[0]
    assert run.selector.metrics()["selector/forecast_skill"] > 0.2


def test_prompts_never_tried_are_forecast_and_not_only_those_that_were():
    run = Run(*world(), explore=0.1)
    for version in range(1, 6):
        run.step(version)
    unseen = np.flatnonzero(run.ledger.visits == 0)
    chosen = run.step(6)
    fresh = np.intersect1d(chosen, unseen)
    assert len(fresh) > 4
    assert abs(run.rates[fresh] - 0.5).mean() < abs(run.rates[unseen] - 0.5).mean()


def test_with_features_that_say_nothing_it_is_uniform_to_the_prompt_and_says_so():
    _, rates = world()
    noise = np.hstack([np.ones((SIZE, 1)), np.random.default_rng(3).standard_normal((SIZE, 3))])
    run, pool = Run(noise, np.full(SIZE, rates.mean())), Pool(SIZE, seed=1, repeat=True)
    uniform = Uniform()
    for version in range(1, 5):
        assert run.step(version).tolist() == uniform.choose(pool, run.ledger, 32, run.rng).tolist()
    assert run.selector.metrics()["selector/forecast_in_use"] == 0
    assert run.selector.metrics()["selector/forecast_scored"] == 96, "of the groups that came before the last choice"


def test_a_prompt_s_own_rollouts_outweigh_the_forecast_in_the_end():
    x, _ = world()
    run = Run(x, np.full(SIZE, 0.5), worth=3.0)
    run.ledger.positives[:] = 0.0
    run.ledger.negatives[:200] = 300.0
    drawn = run.selector._draw(np.arange(SIZE), run.ledger, run.rng)
    assert drawn[:200].max() < 0.1
    assert drawn[200:].mean() > 0.3


def test_groups_of_an_older_policy_count_for_less():
    x, _ = world()
    fresh, stale = Run(x, np.ones(SIZE), forgetting=0.5), Run(x, np.ones(SIZE), forgetting=0.5)
    for run, version in ((fresh, 8), (stale, 2)):
        run.step(version)
        last = Group("g9", Prompt(101, 1), (Rollout("g9", 0, 1.0, 1),), 1, 8)
        run.selector.learn(last, informative=False)
        run.selector.choose(run.pool, run.ledger, 1, run.rng)
    assert 0 < stale.selector._model.mean[0] < fresh.selector._model.mean[0]


def test_a_group_that_was_given_up_teaches_too():
    x, rates = world()
    run = Run(x, rates)
    rollouts = tuple(Rollout("g0", index, 1.0, 1) for index in range(3))
    run.selector.learn_unjudged(Group("g0", Prompt(100, 0), rollouts, 8, 0))
    run.selector.choose(run.pool, run.ledger, 1, run.rng)
    assert run.selector._model.mean @ x[0] > 0


def test_it_keeps_the_promises_of_a_selector_while_uniform_and_while_it_chooses(monkeypatch):
    monkeypatch.setattr("goldilocks.core.forecast_score.ENOUGH", 8)
    monkeypatch.setattr("goldilocks.core.forecast_score.DEVIATIONS", -2)
    chose = []

    class Watched(Forecast):
        def choose(self, *args):
            chose.append(self._score.better)
            return super().choose(*args)

    check_selector(Watched)
    assert set(chose) == {False, True}


def test_without_features_it_says_what_it_needs():
    with pytest.raises(ValueError, match="needs features of the prompts"):
        Forecast().choose(Pool(3, seed=1, repeat=True), Ledger(np.arange(3)), 1, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("key", "value"), [("worth", 0), ("explore", 0), ("target", 1), ("forgetting", 0), ("prior", 0)]
)
def test_parameters_out_of_range_are_named(key, value):
    with pytest.raises(ValueError, match=f"selector.{key}={value}"):
        Forecast(**{key: value})
