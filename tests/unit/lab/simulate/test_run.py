"""The real collector is driven to exactly the budget, and the figures are what the mathematics says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldilocks.config.recipes import names
from goldilocks.core import Collector, ListSource, Surplus
from goldilocks.core.allocators import Adaptive, Fixed
from goldilocks.core.filters import Everything
from goldilocks.core.selectors import Uniform
from goldilocks.lab.simulate import (
    EngineConfig,
    Outcome,
    PassRates,
    Setup,
    SimulatedEngine,
    batches,
    mixture,
    recipe_settings,
    simulate,
)
from goldilocks.types import Group, OnFull, Prompt, Rollout, signal


def constant(rate: float, prompts: int = 200) -> PassRates:
    return PassRates(tuple(range(prompts)), np.full(prompts, rate), np.full(prompts, 50.0))


def outcome(name: str, data: PassRates, **given: Any) -> Outcome:
    setup = Setup(**{"rollouts": 2_000, "target_groups": 16, **given})
    return simulate(name, recipe_settings(name, setup), data, setup)


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_fixed_groups_are_informative_as_often_as_the_binomial_says(name: str, rate: float) -> None:
    n, groups = 8, 125
    got = outcome(name, constant(rate), rollouts=n * groups)
    share = got.informative_groups_per_1k_rollouts * n / 1_000
    expected = 1 - rate**n - (1 - rate) ** n
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / groups)


def test_signal_of_fixed_groups_is_what_a_binomial_leaves() -> None:
    n, groups, rate = 8, 1_000, 0.4
    got = outcome("grpo", constant(rate), rollouts=n * groups)
    assert got.signal_per_1k_rollouts == pytest.approx(1_000 * rate * (1 - rate) * (n - 1) / n, rel=0.03)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    name=st.sampled_from(names()),
    seed=st.integers(0, 99),
    failure_rate=st.sampled_from([0.0, 0.05, 0.5]),
    slots=st.sampled_from([3, 40, 256]),
    rollouts=st.integers(1, 1_500),
)
def test_every_policy_spends_exactly_the_budget_and_every_token_has_an_account(
    name: str, seed: int, failure_rate: float, slots: int, rollouts: int
) -> None:
    data = PassRates(tuple(range(60)), np.linspace(0, 1, 60), np.linspace(90, 20, 60))
    engine = EngineConfig(slots=slots, failure_rate=failure_rate, improvement=0.2)
    got = outcome(name, data, rollouts=rollouts, target_groups=8, seed=seed, engine=engine)
    assert got.rollouts == rollouts
    assert math.fsum(got.token_share.values()) == pytest.approx(1.0)
    assert min(got.token_share.values()) >= 0
    assert (got.token_share["failed"] > 0) <= (failure_rate > 0)
    assert got.hard_prompts_reached is not None
    assert 0 <= got.hard_prompts_reached <= 1


@pytest.mark.parametrize("name", names())
def test_the_same_seed_gives_the_same_outcome_and_another_seed_another(name: str) -> None:
    data = PassRates(tuple(range(200)), np.linspace(0, 1, 200), np.linspace(90, 20, 200))
    engine = EngineConfig(failure_rate=0.02, improvement=0.1)
    first, again, other = (outcome(name, data, rollouts=120, seed=seed, engine=engine) for seed in (3, 3, 4))
    assert first == again
    assert first.tokens != other.tokens


def test_batches_are_whole_and_without_groups_that_teach_nothing() -> None:
    data = mixture()
    collector = recipe_settings("dapo", Setup(target_groups=20, seed=5)).collector(ListSource(data.contents))
    seen = list(batches(collector, SimulatedEngine(data, EngineConfig(failure_rate=0.1), seed=5), 3_000))
    assert len(seen) > 5
    assert {len(batch) for batch in seen} == {20}
    assert all(len(set(group.rewards)) == 2 for batch in seen for group in batch)
    collector.accounts.check()


def test_failed_rollouts_are_made_up_for() -> None:
    got = outcome("grpo", constant(0.5), engine=EngineConfig(failure_rate=0.1), rollouts=4_000)
    whole_groups = 4_000 * 0.9 / 8
    expected = 1_000 * whole_groups * (1 - 2 * 0.5**8) / 4_000
    assert got.informative_groups_per_1k_rollouts == pytest.approx(expected, rel=0.05)


def test_data_without_a_right_answer_costs_the_budget_and_fills_nothing() -> None:
    got = outcome("dapo", constant(0.0))
    assert (got.rollouts, got.batches, got.signal_per_1k_rollouts) == (2_000, 0, 0.0)
    assert (got.engine_steps_per_batch, got.hard_prompts_reached) == (None, None)
    assert got.token_share["filtered"] == pytest.approx(1.0)


def test_a_batch_takes_fewer_steps_when_there_are_more_slots() -> None:
    few, many = (outcome("grpo", constant(0.5), engine=EngineConfig(slots=slots)) for slots in (16, 128))
    assert few.engine_steps_per_batch is not None
    assert many.engine_steps_per_batch is not None
    assert many.engine_steps_per_batch < few.engine_steps_per_batch / 2


def test_a_model_that_learns_ends_with_a_higher_pass_rate() -> None:
    data = mixture()
    still = outcome("dapo", data)
    learning = outcome("dapo", data, engine=EngineConfig(improvement=0.5))
    assert still.mean_pass_rate == pytest.approx(data.pass_rate.mean())
    assert learning.mean_pass_rate > still.mean_pass_rate


def test_hard_prompts_are_reached_more_often_by_more_rollouts_and_impossible_ones_are_not_counted() -> None:
    data = PassRates(tuple(range(100)), np.full(100, 0.05), np.full(100, 50.0))
    few = outcome("grpo", data, rollouts=800)
    many = outcome("grpo", data, rollouts=8_000)
    assert few.hard_prompts_reached == pytest.approx(1 - 0.95**8, abs=0.2)
    assert many.hard_prompts_reached is not None
    assert many.hard_prompts_reached > 0.9
    mixed = PassRates(tuple(range(60)), np.repeat([0.0, 0.2, 0.21], 20), np.full(60, 50.0))
    assert outcome("grpo", mixed).hard_prompts_reached == 1.0


def test_signal_is_of_the_trained_rollouts_around_the_mean_of_all() -> None:
    rollouts = tuple(Rollout("g0", index, reward, 9) for index, reward in enumerate([1.0, 0.0, 0.0, 0.0]))
    assert signal(Group("g0", Prompt(1, 0), rollouts, trained=rollouts[:2])) == pytest.approx(0.75**2 + 0.25**2)


def test_without_repeats_a_run_ends_where_the_data_do() -> None:
    got = outcome("grpo", constant(0.5, prompts=40), repeat=False, target_groups=10)
    assert (got.rollouts, got.batches) == (320, 4)


def test_an_empty_data_set_is_refused_and_one_too_small_for_a_batch_with_the_policys_name() -> None:
    with pytest.raises(ValueError, match="a data set with at least one prompt"):
        outcome("grpo", constant(0.5, prompts=0))
    with pytest.raises(ValueError, match=r"thompson: target_groups .*=16 is not accepted: at most 3"):
        outcome("thompson", constant(0.5, prompts=3))


@pytest.mark.parametrize("stop", ["positive", "contrast", "balanced"])
def test_what_is_trained_is_as_long_as_what_was_started(stop: str) -> None:
    """Where latency is length, short answers arrive first; counting them first trains 0.8 of the mean length."""
    data = PassRates(tuple(range(500)), np.full(500, 0.3), np.full(500, 200.0))
    collector = Collector(
        ListSource(data.contents), Uniform(), Adaptive(max_n=32, stop=stop), Everything(), target_groups=64
    )
    engine = SimulatedEngine(data, EngineConfig(slots=256, spread=0.7, wait=0.0), seed=3)
    trained, ratios = [], []
    for batch in batches(collector, engine, rollouts=10_000):
        trained += [rollout.tokens for group in batch for rollout in group.trained]
        ratios.append(collector.metrics()["length/trained_over_started"])
    assert np.mean(trained) / 200 == pytest.approx(1, abs=0.02)
    assert np.mean(ratios) == pytest.approx(1, abs=0.03)


def test_within_the_groups_of_a_prompt_frontier_trains_answers_as_long_as_those_it_generated() -> None:
    """Chunks are waited for whole; which prompts are chosen, and that shifts the length over all, is another matter."""
    prompts = 64
    data = PassRates(tuple(range(prompts)), np.linspace(0.1, 0.9, prompts), np.full(prompts, 200.0))
    setup = Setup(rollouts=15_000, target_groups=16, engine=EngineConfig(slots=256, spread=0.7, wait=0.0))
    collector = recipe_settings("frontier", setup).collector(data.source(), repeat=True, name="frontier")
    engine = SimulatedEngine(data, setup.engine, seed=3)
    trained = [
        rollout.tokens
        for batch in batches(collector, engine, setup.rollouts)
        for group in batch
        for rollout in group.trained
    ]
    assert len(trained) > 7_500
    assert np.mean(trained) / 200 == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("rate", [0.3, 0.5])
def test_where_all_prompts_are_alike_frontier_is_as_good_as_dapo(rate: float) -> None:
    """Rates at which chance is small beside the two per cent: most groups of eight differ."""
    runs = [outcome("frontier", constant(rate), seed=seed, rollouts=12_000) for seed in (1, 2)]
    expected = 1_000 / 8 * (1 - rate**8 - (1 - rate) ** 8)
    assert np.mean([one.informative_groups_per_1k_rollouts for one in runs]) > 0.98 * expected


def test_partial_rollouts_shorten_steps_and_favour_no_length() -> None:
    """The longest answer is five times the mean; with ``finish`` a step waits for it."""

    def run(surplus: Surplus) -> tuple[float, float]:
        prompts = 2_000
        data = PassRates(tuple(range(prompts)), np.full(prompts, 0.3), np.full(prompts, 200.0))
        own = Collector(ListSource(data.contents), Uniform(), Fixed(8), Everything(), target_groups=32, surplus=surplus)
        machine = SimulatedEngine(data, EngineConfig(slots=512, spread=0.7, wait=0.0, max_tokens=1_000), seed=1)
        trained = [batch for _, batch in zip(range(20), batches(own, machine, rollouts=10**6), strict=False)]
        lengths = [rollout.tokens for batch in trained for group in batch for rollout in group.trained]
        own.accounts.check()
        return machine.clock, float(np.mean(lengths))

    (finish, mean), (partial, length) = run(Surplus()), run(Surplus(4, OnFull.PARTIAL))
    assert partial < 0.6 * finish
    assert length == pytest.approx(mean, rel=0.04)
