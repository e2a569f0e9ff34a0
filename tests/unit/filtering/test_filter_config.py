"""The configuration: what is filled in, what is refused, and what oversampling asks for."""

from __future__ import annotations

import dataclasses

import pytest

from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig
from goldilocks.filtering.config import _ACCEPTED


def test_min_group_size_is_filled_in_as_more_than_half_of_the_target() -> None:
    assert [PPOFilterConfig(target_group_size=n).min_group_size for n in (2, 8, 9, 16)] == [2, 5, 5, 9]
    assert PPOFilterConfig().target_group_size == 16
    assert PPOFilterConfig(target_group_size=8, min_group_size=8).min_group_size == 8


@pytest.mark.parametrize("size", [1, 4, 9])
def test_min_group_size_outside_half_to_all_of_the_target_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"batch_filter.min_group_size={size} is not accepted: 5 to 8"):
        PPOFilterConfig(target_group_size=8, min_group_size=size)


def test_min_group_size_is_free_where_groups_without_variance_are_kept() -> None:
    free = {"target_group_size": 8, "reject_low_variance_groups": False}
    assert [PPOFilterConfig(**free, min_group_size=size).min_group_size for size in (1, 4, 8)] == [1, 4, 8]
    assert PPOFilterConfig(**free).min_group_size == 5
    with pytest.raises(ValueError, match=r"batch_filter.min_group_size=9 is not accepted: 1 to target_group_size=8"):
        PPOFilterConfig(**free, min_group_size=9)


def test_rejection_sample_is_answered_with_the_keys_that_do_it() -> None:
    with pytest.raises(ValueError, match=r"batch_filter.rejection_sample=True is not .*max_response_length=N rejects"):
        PPOBatchFilter({"rejection_sample": True})
    for given in (True, False):
        with pytest.raises(ValueError, match=rf"batch_filter.rejection_sample={given} is not .*max_response_length=N"):
            PPOFilterConfig(rejection_sample=given)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("sample_selection_strategy", "best", "one of uniform, efficiency, efficiency_stochastic, max_variance"),
        ("selection_temperature", 0, "a number above 0"),
        ("selection_temperature", float("nan"), "a number above 0"),
        ("target_group_size", 0, "an integer of at least 1"),
        ("target_group_size", 8.0, "an integer of at least 1"),
        ("target_group_size", True, "an integer of at least 1"),
        ("target_num_groups", 0, "an integer of at least 1, or null"),
        ("min_group_size", "5", "an integer of at least 1, or null"),
        ("reward_threshold", "0.5", "a finite number, or null"),
        ("max_response_length", 0, "an integer of at least 1, or null"),
        ("remove_clip", "yes", "true or false"),
        ("min_rollout_n", 0, "an integer of at least 1"),
        ("reject_low_variance_groups", 1, "true or false"),
        ("invalid_rows", "ignore", "one of error, drop"),
        ("enable_two_gate_filter", None, "true or false"),
        ("gate1_bias_epsilon", -0.1, "a number above 0"),
        ("gate1_mode", "max", "one of mean, abs"),
        ("gate2_instability_threshold", float("inf"), "a finite number"),
        ("gate_always", 0, "true or false"),
        ("varying_group_sizes", 0, "true or false"),
        ("prompt_oversampling_factor", 0.5, "a number of at least 1"),
        ("sample_oversampling_factor", "2", "a number of at least 1"),
    ],
)
def test_a_value_that_is_not_accepted_is_named_with_what_would_be(field: str, value: object, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"^batch_filter.{field}=.* is not accepted: {wanted}"):
        PPOFilterConfig(**{field: value})


def test_every_field_has_a_check() -> None:
    assert set(_ACCEPTED) == {field.name for field in dataclasses.fields(PPOFilterConfig)}


def test_combinations_that_would_keep_nothing_or_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="reject_low_variance_groups=True is not accepted: False with target_group"):
        PPOFilterConfig(target_group_size=1)
    assert PPOFilterConfig(target_group_size=1, reject_low_variance_groups=False).min_group_size == 1
    with pytest.raises(ValueError, match="max_response_length=None is not accepted: an integer with remove_clip=True"):
        PPOFilterConfig(remove_clip=True)


def test_it_is_built_from_a_mapping_as_yaml_gives_it_and_an_unknown_key_is_answered_with_the_nearest_field() -> None:
    given = {"target_group_size": 8, "min_group_size": None, "sample_oversampling_factor": 1.5}
    assert PPOFilterConfig.from_mapping(given) == PPOFilterConfig(target_group_size=8, sample_oversampling_factor=1.5)
    assert PPOBatchFilter(given).config.min_group_size == 5
    with pytest.raises(ValueError, match=r"target_groupsize is not a key \(did you mean 'target_group_size'\?\)"):
        PPOFilterConfig.from_mapping({"target_groupsize": 8})


@pytest.mark.parametrize("factor", [1.0, 1.1, 1.5, 2.0, 3.3])
@pytest.mark.parametrize("prompts", [1, 7, 10, 512])
def test_prompt_oversampling_asks_for_more_and_keeps_what_was_wanted(factor: float, prompts: int) -> None:
    config = PPOFilterConfig(prompt_oversampling_factor=factor)
    asked = config.prompts_to_generate(prompts)
    assert factor * prompts - 1e-6 <= asked < factor * prompts + 1
    assert config.groups_to_keep(asked) == prompts
    stated = PPOFilterConfig(prompt_oversampling_factor=factor, target_num_groups=3)
    assert stated.groups_to_keep(asked) == 3, "a stated number wins over the factor"


def test_sample_oversampling_asks_for_more_rollouts_of_each_prompt() -> None:
    for factor, asked in {1: 10, 1.1: 11, 1.5: 15}.items():
        assert PPOFilterConfig(target_group_size=10, sample_oversampling_factor=factor).rollouts_to_generate == asked
