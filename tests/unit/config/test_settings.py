"""What a user sets, checked before anything starts."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import settings
from omegaconf import OmegaConf

import goldilocks.config
from goldilocks.config.sections import AdaptiveRollout, FilterGroups, Policies
from goldilocks.core import ListSource
from goldilocks.core.allocators import Adaptive, Fixed, Knapsack
from goldilocks.core.filters import Everything, Variance
from goldilocks.core.selectors import Thompson
from goldilocks.filtering import PPOFilterConfig
from goldilocks.filtering.config import OF_LIBRARY_CALLS
from goldilocks.verl.checks import estimator_for
from goldilocks.verl.v0.python_config import FilterGroupsConfig

DEFAULTS = Path(goldilocks.config.__file__).parent / "goldilocks" / "defaults.yaml"


def test_with_everything_off_every_prompt_gets_n_and_all_are_trained() -> None:
    chosen = settings()
    assert chosen.allocator() == Fixed(4)
    assert chosen.filter() == Everything()


def test_filter_groups_is_dynamic_sampling_on_the_metric() -> None:
    chosen = settings(
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=10",
        "data.gen_batch_size=24",
    )
    assert chosen.filter() == Variance("acc")
    collector = chosen.collector(ListSource(["a", "b"]))
    assert (collector.target_groups, collector.gen_batch_size) == (8, 24)
    assert collector.limits.max_num_gen_batches == 10


@pytest.mark.parametrize(
    ("carried", "given", "at_once", "ahead"),
    [(2, [], 16, 4), (1, [], 8, 0), (2, ["data.gen_batch_size=24"], 24, 4)],
)
def test_groups_that_grow_by_chunks_are_begun_ahead_where_they_may_be_trained_later(
    carried: int, given: list[str], at_once: int, ahead: int
) -> None:
    chosen = settings("goldilocks.allocator=sequential", f"algorithm.filter_groups.max_carry_steps={carried}", *given)
    collector = chosen.collector(ListSource(["a", "b"]))
    assert (collector.target_groups, collector.gen_batch_size, collector.ahead) == (8, at_once, ahead)


@pytest.mark.parametrize("metric", ["seq_reward", "seq_final_reward"])
def test_the_names_of_the_summed_score_mean_the_reward(metric: str) -> None:
    chosen = settings("algorithm.filter_groups.enable=true", f"algorithm.filter_groups.metric={metric}")
    assert chosen.filter() == Variance("reward")
    assert not chosen.judges_final_reward  # without a penalty the final reward is the reward


def test_the_reward_after_the_kl_penalty_is_judged_once_it_is_known() -> None:
    chosen = settings(
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=seq_final_reward",
        "algorithm.use_kl_in_reward=true",
    )
    assert chosen.judges_final_reward
    assert chosen.filter() == Everything()


@pytest.mark.parametrize(
    ("overrides", "estimator"),
    [
        ([], "rloo"),
        (["adaptive_rollout.enable=true"], "rloo"),
        (["adaptive_rollout.enable=true", "adaptive_rollout.max_train_n=2"], "rloo_pool"),
        (["goldilocks.allocator=adaptive", "goldilocks.allocator_kwargs.max_train_n=2"], "rloo_pool"),
        (["batch_filter.enable=true"], "rloo"),
        (["batch_filter.sample_oversampling_factor=1.5"], "rloo_pool"),
        (["batch_filter.reward_threshold=0.1"], "rloo_pool"),
        (["batch_filter.enable=true", "adaptive_rollout.enable=true"], "rloo_pool"),
    ],
)
def test_where_part_of_a_group_is_trained_the_baseline_is_from_all_of_it(overrides: list[str], estimator: str) -> None:
    assert estimator_for(settings("algorithm.adv_estimator=rloo", *overrides)) == estimator


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.use_kl_in_reward=true"], r"use_kl_in_reward=True is not accepted: False with .*=grpo_pool"),
        (["algorithm.adv_estimator=gdpo"], r"adv_estimator='gdpo' is not accepted: grpo, "),
    ],
)
def test_a_baseline_that_cannot_be_had_is_refused_before_v1s_trainer_starts(overrides: list[str], message: str) -> None:
    part = settings("adaptive_rollout.enable=true", "adaptive_rollout.max_train_n=2", *overrides)
    with pytest.raises(ValueError, match=message):
        estimator_for(part)


def test_policies_are_chosen_by_name_with_their_keys() -> None:
    assert settings("goldilocks.allocator_kwargs.n=6").allocator() == Fixed(6)  # another n than the rollouts'
    assert settings("goldilocks.allocator=fixed", "goldilocks.allocator_kwargs.n=6").allocator() == Fixed(6)
    assert settings("adaptive_rollout.enable=true", "adaptive_rollout.max_n=32").allocator() == Adaptive(max_n=32)
    chosen = settings(
        "goldilocks.selector=thompson", "goldilocks.selector_kwargs.target=0.3", "goldilocks.allocator=knapsack"
    )
    assert chosen.selector() == Thompson(target=0.3)
    assert isinstance(chosen.allocator(), Knapsack)


def test_the_batch_filter_changes_what_is_asked_for() -> None:
    chosen = settings("batch_filter.sample_oversampling_factor=1.5", "batch_filter.prompt_oversampling_factor=2.0")
    assert chosen.allocator() == Fixed(6)
    assert chosen.collector(ListSource(["a", "b"])).gen_batch_size == 16
    assert chosen.batch_filter_config is not None
    assert chosen.batch_filter_config.target_group_size == 4
    assert chosen.gate_config == PPOFilterConfig(
        target_group_size=4, sample_oversampling_factor=1.5, target_num_groups=8, gate_always=True
    )
    assert settings("batch_filter.enable=false", "batch_filter.min_rollout_n=2").batch_filter_config is None


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ([], (4, 3, False)),
        (["goldilocks.allocator_kwargs.n=2"], (2, 2, False)),
        (["batch_filter.sample_oversampling_factor=2.0"], (4, 3, False)),
        (["adaptive_rollout.enable=true"], (4, 3, True)),
        (["adaptive_rollout.enable=true", "adaptive_rollout.max_train_n=2"], (2, 2, True)),
        (["goldilocks.allocator=pilot"], (4, 3, True)),
    ],
)
def test_no_group_is_asked_for_more_rows_than_its_allocator_gives_it(
    overrides: list[str], sizes: tuple[int, int, bool]
) -> None:
    gate = settings("batch_filter.enable=true", *overrides).gate_config
    assert gate is not None
    assert (gate.target_group_size, gate.min_group_size, gate.varying_group_sizes) == sizes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_rollout_ref.rollout.n=1", "algorithm.filter_groups.enable=true"], r"rollout.n=1 is not accepted: 2"),
        (
            ["goldilocks.allocator=fixed", "goldilocks.allocator_kwargs.n=1", "goldilocks.filter=[length,variance]"],
            r"goldilocks.allocator_kwargs.n=1 is not accepted: 2 or more",
        ),
        (["adaptive_rollout.enable=true", "adaptive_rollout.max_n=3"], r"max_n=3 is not accepted: rollout.n=4 or more"),
        (["adaptive_rollout.enable=true", "goldilocks.allocator=pilot"], r"allocator='pilot' is not accepted"),
        (["adaptive_rollout.stop=never", "adaptive_rollout.enable=true"], r"adaptive_rollout.stop='never'"),
        (["adaptive_rollout.enabled=true"], r"adaptive_rollout.enabled is not a key \(did you mean 'enable'\?\)"),
        (["batch_filter.enable=false", "batch_filter.gate3=true"], r"batch_filter.gate3 is not a key"),
        (["batch_filter.gate1_epsilon=1"], r"batch_filter.gate1_epsilon is not a key \(did you mean 'gate1_"),
        (["batch_filter.target_num_groups=4"], r"target_num_groups=4 is not accepted: data.train_batch_size=8, or"),
        (
            ["batch_filter.prompt_oversampling_factor=2.0", "data.gen_batch_size=16"],
            r"prompt_oversampling_factor=2.0 is not accepted: 1 with data.gen_batch_size=16",
        ),
        (["goldilocks.allocator_kwargs.mean_n=4"], r"allocator_kwargs=\{'mean_n': 4\} is not accepted: n alone"),
        (
            ["goldilocks.allocator=fixed", "goldilocks.allocator_kwargs.mean_n=4"],
            r"allocator_kwargs=\{'mean_n': 4\} is not accepted: n alone with goldilocks.allocator=fixed",
        ),
        (
            ["adaptive_rollout.enable=true", "goldilocks.allocator_kwargs.n=4"],
            r"allocator_kwargs=\{'n': 4\} is not accepted: none with adaptive_rollout.enable=True",
        ),
        (["goldilocks.filter_kwargs.min_std=0.1"], r"filter_kwargs=\{'min_std': 0.1\} is not accepted: none without"),
        (["goldilocks.filter=band", "algorithm.filter_groups.enable=true"], r"enable=True is not accepted: False with"),
        (
            ["goldilocks.prior=strata", "goldilocks.strata.columns=[skill]"],
            r"goldilocks.strata.columns='skill' is not accepted: a column .*.*level",
        ),
    ],
)
def test_a_mistake_names_the_key_and_what_would_be_accepted(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(*overrides).collector(ListSource(["a", "b"], columns={"level": [1, 2]}))


def test_a_filter_of_ones_own_may_keep_groups_of_one_whatever_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_variance", SimpleNamespace(Low=Everything))
    assert settings("actor_rollout_ref.rollout.n=1", "goldilocks.filter='my_variance:Low'").drops_groups


def test_the_config_group_has_every_key_with_its_default() -> None:
    given: Any = OmegaConf.to_container(OmegaConf.load(DEFAULTS), resolve=True)
    for section, cls in (("adaptive_rollout", AdaptiveRollout), ("goldilocks", Policies)):
        assert given[section] == {one.name: getattr(cls(), one.name) for one in fields(cls)}
    known = FilterGroups()
    assert given["algorithm"]["filter_groups"].pop("_target_") == f"{FilterGroupsConfig.__module__}.FilterGroupsConfig"
    assert all(value == getattr(known, name) for name, value in given["algorithm"]["filter_groups"].items())
    filtering = PPOFilterConfig()
    listed = {name: value for name, value in given["batch_filter"].items() if name != "enable"}
    own = {"target_group_size", *OF_LIBRARY_CALLS}  # a trainer knows these: the first is rollout.n
    assert set(listed) == {one.name for one in fields(PPOFilterConfig)} - own
    derived = {"min_group_size": None}
    assert listed == {name: derived.get(name, getattr(filtering, name)) for name in listed}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["goldilocks.budget.rollout=2"], "goldilocks.budget.rollout is not a key"),
        (["goldilocks.budget=true"], "goldilocks.budget=True is not accepted: keys with their values"),
        (["adaptive_rollout=true"], "adaptive_rollout=True is not accepted: keys with their values"),
        (["goldilocks.validate_by=level"], r"goldilocks.validate_by='level' is not accepted: a list of words"),
        (["goldilocks.validate_by=[1]"], r"goldilocks.validate_by=\[1\] is not accepted: a list of words"),
        (["goldilocks.rewards.functions=5"], "goldilocks.rewards.functions=5 is not accepted: keys with their values"),
        (["goldilocks.filter=true"], "goldilocks.filter=True is not accepted: a word, or a list of words"),
        (["actor_rollout_ref.rollout.n='8'"], "actor_rollout_ref.rollout.n='8' is not accepted: a whole number"),
        (["data.train_batch_size=null"], "data.train_batch_size=None is not accepted: a whole number"),
        (["data.seed=x"], "data.seed='x' is not accepted: a whole number or null"),
        (["data.seed=-1"], "data.seed=-1 is not accepted: 0 or more"),
        (["data.gen_batch_size=0"], "data.gen_batch_size=0 is not accepted: 1 or more"),
        (["actor_rollout_ref.rollout.n=0"], "actor_rollout_ref.rollout.n=0 is not accepted: 1 or more"),
        (["algorithm.filter_groups={enable: true, min_std: -1}"], "algorithm.filter_groups.min_std=-1 is not accepted"),
        (["goldilocks.prior=stratum"], r"goldilocks.prior='stratum' is not accepted: one of .*did you mean 'strata'"),
        (["goldilocks.prior=oracle", "goldilocks.study=true", "goldilocks.strata.columns=[level]"], "one column"),
        (
            ["goldilocks.prior=oracle", "goldilocks.strata.columns=[level]", "goldilocks.validate_by=[level]"],
            "goldilocks.prior='oracle' is not accepted: flat or strata;",  # without goldilocks.study
        ),
        (["goldilocks.forgetting=0.9"], "goldilocks.forgetting is not a key"),
        (["goldilocks.cost=seconds"], "goldilocks.cost='seconds' is not accepted: one of .*tokens"),
        (["goldilocks.strata.columns=level"], "goldilocks.strata.columns='level' is not accepted: a list"),
    ],
)
def test_sections_are_checked_before_anything_starts(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(*overrides)


def test_a_section_that_is_left_empty_has_its_defaults() -> None:
    sections = ("selector_kwargs", "allocator_kwargs", "filter_kwargs", "strata", "budget")
    assert settings(*(f"goldilocks.{name}=null" for name in sections)).policies == settings().policies


def test_the_prior_is_named_and_strata_are_columns_or_the_shape_of_the_text() -> None:
    source = ListSource([f"add {10**level}" for level in (1, 5) for _ in range(8)], columns={"level": [1, 5] * 8})
    flat, text = settings().beliefs(source), settings("goldilocks.prior=strata").beliefs(source)
    level = settings("goldilocks.prior=strata", "goldilocks.strata.columns=[level]").beliefs(source)
    assert len(flat.rates) == 0
    assert len(text.rates.state_dict()["spread"]) > 2
    assert (len(level.rates.state_dict()["spread"]), len(level.rates)) == (2, 1 + 2)  # of all, and two levels


def test_the_belief_of_each_value_that_is_validated_by_is_logged_with_strata_by_that_column() -> None:
    source = ListSource([str(row) for row in range(1_000)], columns={"level": [1, 5] * 500, "kind": ["a"] * 1_000})
    keys = ["goldilocks.prior=strata", "goldilocks.strata.columns=[level,kind]", "goldilocks.validate_by=[level]"]
    beliefs = settings(*keys).beliefs(source)
    for row in range(200):
        beliefs.learn_rate(row, 8 * (row % 2), 8)
    low, high = (beliefs.metrics()[f"belief/level/{level}"] for level in (1, 5))
    assert low < 0.1
    assert high > 0.9
    assert "belief/kind/a" not in beliefs.metrics()


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["goldilocks.prior=strata"], "goldilocks.prior='strata' has no effect: it is read with a selector"),
        (["goldilocks.strata.columns=[level]"], "goldilocks.strata.columns=['level'] has no effect"),
        (["adaptive_rollout.max_n=64"], "adaptive_rollout.max_n=64 has no effect: it is read with adaptive_rollout.en"),
        (["goldilocks.cost=rollouts", "goldilocks.selector=thompson"], "goldilocks.cost='rollouts' has no effect"),
        (["algorithm.filter_groups.min_std=0.1"], "algorithm.filter_groups.min_std=0.1 has no effect"),
        (["algorithm.filter_groups.on_exhausted=shrink"], "algorithm.filter_groups.on_exhausted='shrink' has no "),
        (["algorithm.filter_groups.metric=a", "goldilocks.filter=band"], "algorithm.filter_groups.metric='a' has no"),
        (
            ["adaptive_rollout.enable=true", "adaptive_rollout.balance=3"],
            "adaptive_rollout.balance=3 has no effect: it",
        ),
        (
            ["batch_filter.enable=true", "batch_filter.gate1_mode=abs"],
            "batch_filter.gate1_mode='abs' has no effect: it",
        ),
    ],
)
def test_a_key_without_effect_is_said(overrides: list[str], key: str, caplog: Any) -> None:
    source = ListSource("abcdefgh", columns={"level": [1, 2] * 4})
    settings(*overrides).collector(source)
    assert next(record.message for record in caplog.records if "no effect" in record.message).startswith(key)
    caplog.clear()
    wanted = ["goldilocks.prior=strata", "goldilocks.strata.columns=[level]", "goldilocks.selector=frontier"]
    wanted += ["goldilocks.cost=rollouts", "algorithm.filter_groups.enable=true", "algorithm.filter_groups.min_std=0.1"]
    settings(*wanted, "adaptive_rollout.enable=true", "adaptive_rollout.max_n=64").collector(source)
    assert not caplog.records


def test_what_happens_at_a_limit_is_read_with_a_limit_and_where_prompts_run_out(caplog: Any) -> None:
    key, source = "algorithm.filter_groups.on_exhausted=shrink", ListSource("abcdefgh")
    settings(key).collector(source, repeat=False)
    own = "goldilocks.selector=goldilocks.core.selectors:Uniform"  # which may say that there are no more
    for bound in ("algorithm.filter_groups.max_num_gen_batches=2", "goldilocks.max_tokens_per_step=9", own):
        settings(key, bound).collector(source)
    assert not caplog.records


@pytest.mark.parametrize(
    ("overrides", "judged_by"),
    [
        (["algorithm.filter_groups.enable=true"], None),  # acc where it is returned
        (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=seq_reward"], "reward"),
        (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score"], "score"),
        (["goldilocks.filter=band"], None),
        (["goldilocks.filter=[variance,length]", "goldilocks.filter_kwargs.metric=score"], "score"),
        ([], "reward"),
    ],
)
def test_groups_are_judged_by_acc_where_no_metric_is_named(overrides: list[str], judged_by: str | None) -> None:
    assert settings(*overrides).outcome == judged_by
    assert settings(*overrides).beliefs(ListSource(["a"])).metric == judged_by
