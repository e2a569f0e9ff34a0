"""Each policy, as its definition says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from goldilocks.core import Beliefs, build_allocator, build_filter, build_selector
from goldilocks.core.allocators import ALLOCATORS, Adaptive, Fixed, Knapsack, Pilot, Sequential
from goldilocks.core.filters import FILTERS, Band, Length, Variance
from goldilocks.core.groups import OpenGroup
from goldilocks.core.selectors import SELECTORS, Greso, Thompson, Uniform
from goldilocks.core.source import PromptOrder
from goldilocks.testing import check_allocator, check_filter, check_selector
from goldilocks.types import Group, Prompt, Rollout


def untouched(size: int = 10) -> Beliefs:
    return Beliefs(np.arange(size, dtype=np.uint64))


def group(rewards: Sequence[float], *, planned: int = 0, tokens: int = 5, truncated: bool = False) -> Group:
    rollouts = [
        Rollout("g0", index, reward, tokens, metrics={"acc": reward}, truncated=truncated)
        for index, reward in enumerate(rewards)
    ]
    return Group("g0", Prompt(0, 0), rollouts, planned)


KINDS = (
    (check_selector, build_selector, SELECTORS),
    (check_allocator, build_allocator, ALLOCATORS),
    (check_filter, build_filter, FILTERS),
)


@pytest.mark.parametrize(("check", "build", "name"), [(*kind, name) for *kind, names in KINDS for name in names])
def test_every_policy_keeps_the_contract_of_its_kind(check, build, name: str) -> None:
    check(lambda: build(name))


# -- allocators --------------------------------------------------------------------------------------------------------


def test_fixed_wants_n_whatever_happened() -> None:
    assert Fixed(5).first(np.arange(3), untouched()) == [5, 5, 5]
    assert Fixed(5).wanted(group([1, 1, 1]), untouched()) == 5


def test_where_rollouts_cost_nothing_sequential_gives_no_group_up() -> None:
    allocator, beliefs = Sequential(n=4), untouched()
    for _ in range(8):  # a backend that counts no tokens
        allocator.learn(group([0, 1], tokens=0), beliefs)
    assert allocator.price == 0
    assert allocator.first(np.arange(2), beliefs) == [4, 4]


@pytest.mark.parametrize(
    ("stop", "rewards", "wanted"),
    [
        ("positive", [1, 1], 2),  # an easy prompt costs two
        ("positive", [0, 1], 2),
        ("positive", [0, 0], 10),  # two, then eight at a time
        ("positive", [0, 0, 1, 1], 4),  # satisfied
        ("positive", [0] * 10, 18),
        ("positive", [0] * 18, 20),  # never past max_n
        ("positive", [0] * 20, 20),
        ("contrast", [1, 1], 10),
        ("contrast", [1, 0], 2),
        ("balanced", [1, 0], 10),
        ("balanced", [1, 0, 1, 0], 4),
    ],
)
def test_adaptive_asks_until_the_rule_is_satisfied(stop: str, rewards: list[float], wanted: int) -> None:
    assert Adaptive(max_n=20, stop=stop).wanted(group(rewards), untouched()) == wanted


def test_adaptive_counts_a_reward_at_the_threshold_as_positive() -> None:
    beliefs = Beliefs(np.arange(1, dtype=np.uint64), positive_threshold=0.7)
    assert Adaptive().wanted(group([0.69, 0.0]), beliefs) > 2
    assert Adaptive().wanted(group([0.7, 0.0]), beliefs) == 2


def test_adaptive_looks_at_each_rollout_of_an_open_group_once() -> None:
    looked_at: list[int] = []

    class Watched(Beliefs):
        def passed(self, rollout: Rollout) -> bool:
            looked_at.append(rollout.index)
            return super().passed(rollout)

    beliefs, one = Watched(np.arange(1, dtype=np.uint64)), OpenGroup("g0", Prompt(0, 0), planned=2, version=0)
    for index in range(64):
        one.rollouts.append(Rollout("g0", index, 0.0, 1))
        Adaptive(max_n=64, rollouts_per_batch=1).wanted(one.view(), beliefs)
    assert looked_at == list(range(64))


def test_max_train_n_keeps_both_signs_and_their_ratio() -> None:
    chosen = Adaptive(max_train_n=4).trained(group([0] * 15 + [1]), untouched())
    assert sorted(rollout.reward for rollout in chosen) == [0, 0, 0, 1]
    chosen = Adaptive(max_train_n=4).trained(group([0] * 8 + [1] * 8), untouched())
    assert sum(rollout.reward for rollout in chosen) == 2
    chosen = Adaptive(max_train_n=4).trained(group([1] * 15 + [0]), untouched())
    assert sorted(rollout.reward for rollout in chosen) == [0, 1, 1, 1]
    assert len(Adaptive(max_train_n=4).trained(group([0] * 9), untouched())) == 4


@pytest.mark.parametrize(
    ("rewards", "wanted"), [([1, 1, 1, 1], 4), ([0, 0, 0, 0], 4), ([1, 0, 1, 1], 16), ([1, -1, 1, 1], 16)]
)
def test_pilot_commits_only_where_the_pilots_differ(rewards: list[float], wanted: int) -> None:
    assert Pilot().wanted(group(rewards), untouched()) == wanted


def test_knapsack_spends_its_budget_on_uncertain_prompts_and_prefers_hard_ones() -> None:
    beliefs = untouched(4)
    for index, positives in enumerate([0, 5, 15, 20]):
        beliefs.positives[index], beliefs.negatives[index] = positives, 20 - positives
    sizes = Knapsack(mean_n=8, max_n=64, memory=0).first(np.arange(4), beliefs)
    assert sum(sizes) == 32
    assert sizes[1] > sizes[2] > sizes[3]  # a quarter right is worth more than three quarters right
    assert min(sizes) >= 2


def test_knapsack_prefers_the_cheaper_of_two_equal_prompts() -> None:
    beliefs = untouched(2)
    beliefs.visits[:] = 1
    beliefs.tokens[:] = [100, 1000]
    cheap, dear = Knapsack(memory=0).first(np.arange(2), beliefs)
    assert cheap > dear


def test_knapsack_weighs_a_lone_prompt_against_those_seen_before() -> None:
    beliefs = untouched(40)
    beliefs.negatives[:20], beliefs.positives[:20] = 20, 8
    beliefs.positives[20:] = 30
    allocator = Knapsack()
    allocator.first(np.arange(1, 39), beliefs)
    worth, worthless = allocator.first(np.array([0]), beliefs)[0], allocator.first(np.array([39]), beliefs)[0]
    assert worth > 8 > worthless


# -- selectors ---------------------------------------------------------------------------------------------------------


def test_uniform_shows_every_prompt_once_an_epoch_and_without_repeats_the_pass_ends() -> None:
    pool, rng = PromptOrder(10, seed=0, repeat=True), np.random.default_rng(0)
    first = np.concatenate([Uniform().choose(pool, untouched(), k, rng) for k in (3, 3, 4)])
    second = Uniform().choose(pool, untouched(), 10, rng)
    assert sorted(first) == sorted(second) == list(range(10))
    assert list(first) != list(second)
    assert pool.epoch == 1
    once = PromptOrder(10, seed=0, repeat=False)
    assert [len(Uniform().choose(once, untouched(), 7, rng)) for _ in range(3)] == [7, 3, 0]


def test_greso_skips_streaks_and_comes_back_to_them_now_and_then() -> None:
    beliefs, pool, rng = untouched(2_000), PromptOrder(2_000, seed=0, repeat=True), np.random.default_rng(0)
    beliefs.streak[:1_000] = 3
    chosen = np.concatenate([Greso(p=0.5).choose(pool, beliefs, 100, rng) for _ in range(10)])
    assert np.mean(chosen < 1_000) == pytest.approx(0.125 / 1.125, abs=0.04)  # 1,000 × 0.5³ against 1,000


def test_greso_explores_less_while_too_much_comes_back_without_variance() -> None:
    selector, pool, rng = Greso(p=0.5), PromptOrder(10, seed=0, repeat=True), np.random.default_rng(0)
    for informative, p in ((False, 0.49), (False, 0.48), (True, 0.49)):
        for _ in range(4):
            selector.learn(group([1, 0]), untouched(), informative=informative)
        selector.choose(pool, untouched(), 2, rng)
        assert selector.metrics()["selector/greso_p"] == pytest.approx(p)


def test_thompson_prefers_prompts_believed_near_the_target_and_tries_the_unknown() -> None:
    beliefs, pool, rng = untouched(300), PromptOrder(300, seed=0, repeat=True), np.random.default_rng(0)
    beliefs.positives[:100] = beliefs.negatives[:100] = 50
    beliefs.positives[100:200] = 100
    chosen = Thompson(explore=0).choose(pool, beliefs, 100, rng)
    known, solved, unknown = (np.sum((chosen >= lo) & (chosen < lo + 100)) for lo in (0, 100, 200))
    assert known > 60
    assert solved == 0
    assert unknown > 0


def test_thompson_never_chooses_a_prompt_in_hand_nor_one_twice_where_it_explores_over_the_end_of_a_pass() -> None:
    again, rng = PromptOrder(10, seed=0, repeat=True), np.random.default_rng(0)
    for _ in range(20):
        assert len(set(Thompson(explore=1.0).choose(again, untouched(), 8, rng).tolist())) == 8
    pool = PromptOrder(10, seed=0, repeat=True)
    pool.claim([1, 2, 3])
    assert sorted(Thompson().choose(pool, untouched(), 10, np.random.default_rng(0))) == [0, 4, 5, 6, 7, 8, 9]


# -- filters -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [
        ([1, 0], True, ""),
        ([1, 1, 1], False, "too_easy"),
        ([0, 0, 0], False, "too_hard"),
        ([0.5, 0.5 + 1e-9], False, "too_easy"),  # shaped rewards never give an exact zero
        ([0.7], False, "single"),  # a group of one has no contrast
    ],
)
def test_variance_keeps_groups_whose_rewards_differ(rewards: list[float], keep: bool, reason: str) -> None:
    verdict = Variance().judge(group(rewards))
    assert (verdict.keep, verdict.reason) == (keep, reason)


def test_variance_judges_the_metric_it_is_told_to() -> None:
    assert Variance(metric="acc").judge(group([1, 0])).keep
    with pytest.raises(ValueError, match=r"metric='f1' is not accepted: .* one of which has acc, reward"):
        Variance(metric="f1").judge(group([1, 0]))


def test_band_counts_passes_and_not_the_mean_of_rewards_and_excludes_its_ends() -> None:
    assert Band(lo=0, hi=1).judge(group([1, 0])).keep
    assert Band(lo=0, hi=1).judge(group([1, 1])).reason == "above_band"
    assert Band(lo=0, hi=1).judge(group([-1, -1])).reason == "below_band"
    assert Band(lo=0.5, hi=1).judge(group([1, 0])).reason == "below_band"
    assert Band(lo=0, hi=0.5).judge(group([-1, -1, -1, 1])).keep  # the mean, −0.5, is outside


def test_length_drops_groups_with_too_few_finished_answers() -> None:
    assert Length().judge(group([1, 0])).keep
    assert Length().judge(group([1, 0], truncated=True)).reason == "overlong"
    assert Length(max_tokens=4).judge(group([1, 0], tokens=5)).reason == "overlong"
    assert not Length(min_finished=3).judge(group([1, 0])).keep


def test_a_chain_gives_the_first_reason() -> None:
    both = build_filter(["length", "variance"], {"max_tokens": 4, "metric": "acc"})
    assert both.judge(group([1, 0], tokens=4)).keep
    assert both.judge(group([1, 1], tokens=4)).reason == "too_easy"
    assert both.judge(group([1, 1], tokens=5)).reason == "overlong"


# -- names and parameters ----------------------------------------------------------------------------------------------


class Twice(Fixed):
    """A user's own policy, named as package.module:Class."""

    def wanted(self, group: Group, beliefs: Beliefs) -> int:
        return 2 * self.n


def test_a_policy_of_ones_own_is_named_by_module_and_class() -> None:
    assert build_allocator("unit.core.test_policies:Twice", {"n": 3}).wanted(group([]), untouched()) == 6
    check_allocator(lambda: Twice(3))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: build_selector("tompson"), r"selector='tompson' is not accepted: .*did you mean 'thompson'\?\)"),
        (lambda: build_allocator("fixed", {"m": 3}), r"goldilocks.allocator_kwargs.m is not a key; there are: n"),
        (lambda: build_allocator("fixed", {"n": -1}), r"goldilocks.allocator_kwargs.n=-1 is not accepted: 1 or more"),
        (lambda: build_allocator("no.such:Thing"), r"cannot be imported: No module named 'no'"),
        (lambda: build_selector(":Mine"), r"selector=':Mine' cannot be imported: Empty module name"),
        (lambda: build_selector(".mine:Mine"), r"selector='.mine:Mine' cannot be imported: the 'package' argument"),
        (lambda: build_allocator("pathlib:Path"), r"is not accepted: a subclass of .*Allocator"),
        (lambda: build_allocator("adaptive", {"max_n": 1}), r"max_n=1 is not accepted: min_rollouts=2 or more"),
        (lambda: build_allocator("knapsack", {"mean_n": 99}), r"mean_n=99 is not accepted: between"),
        (lambda: build_filter("band", {"lo": 2}), r"goldilocks.filter_kwargs.lo=2 is not accepted: below hi=1.0"),
        (lambda: build_filter(["band", "length"], {"low": 2}), r"goldilocks.filter_kwargs.low is not a key .*'lo'"),
    ],
)
def test_bad_names_and_parameters_say_what_would_be_accepted(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_policy_that_forgets_its_state_fails_the_contract() -> None:
    class Forgetful(Fixed):
        def __post_init__(self) -> None:
            self.calls = 0

        def first(self, rows, beliefs):
            self.calls += 1
            return [1 + self.calls % 3] * len(rows)

        def wanted(self, group: Group, beliefs: Beliefs) -> int:
            return group.planned

    with pytest.raises(AssertionError, match="state_dict misses something"):
        check_allocator(Forgetful)


def test_a_policy_that_draws_from_a_generator_of_its_own_fails_the_contract() -> None:
    class Fickle(Uniform):
        def choose(self, pool, beliefs, k, rng):
            return np.random.default_rng().choice(pool.free(), size=k, replace=False)

    with pytest.raises(AssertionError, match="draw only from the rng you are given"):
        check_selector(Fickle)
