"""``groups_per_update`` in verl's keys, and values at the edge of a grid."""

from __future__ import annotations

import pytest

from goldilocks.config.recipes import choose, compose_config, names
from goldilocks.config.settings import Settings
from goldilocks.lab.compare.arm import (
    BATCH,
    GENERATED,
    GROUPS,
    LIMIT,
    MINI_BATCH,
    Arm,
    Edge,
    EqualCost,
    edges,
    unit_words,
)
from goldilocks.launch.on_trl import slots


def test_a_batch_has_as_many_prompts_as_it_wants_groups_and_more_at_a_time_where_a_recipe_drops_groups():
    assert unit_words("grpo", {GROUPS: "4", "lr": "1"}, []) == [f"{BATCH}=4", f"{MINI_BATCH}=4", "lr=1"]
    sizes = [f"{BATCH}=4", f"{MINI_BATCH}=4", f"{GENERATED}=16", f"{LIMIT}=200"]
    assert unit_words("dapo", {GROUPS: "4"}, []) == sizes
    assert unit_words("dapo", {GROUPS: "4"}, [f"{LIMIT}=0"]) == sizes[:3], "no limit stays none"


@pytest.mark.parametrize(
    "word", ["algorithm.filter_groups.enable=True", "goldilocks.filter=variance", "+batch_filter.enable=true"]
)
def test_a_filter_may_be_the_users_own_word(word):
    assert f"{GENERATED}=16" in unit_words("grpo", {GROUPS: "4"}, [word])


@pytest.mark.parametrize("word", [f"{GENERATED}=9", "batch_filter.prompt_oversampling_factor=2"])
def test_what_the_user_says_of_the_prompts_at_a_time_stays(word):
    assert unit_words("dapo", {GROUPS: "4"}, [word]) == [f"{BATCH}=4", f"{MINI_BATCH}=4"]


def test_a_batch_that_the_user_names_is_cut_into_mini_batches():
    assert unit_words("dapo", {GROUPS: "4"}, [f"{BATCH}=32", "trainer=trl", "trainer.save_freq=-1"]) == [
        f"{MINI_BATCH}=4"
    ]
    assert unit_words("dapo", {GROUPS: "4", BATCH: "32"}, []) == [f"{MINI_BATCH}=4", f"{BATCH}=32"]
    with pytest.raises(ValueError, match="groups_per_update=5 is not accepted: a divisor of"):
        unit_words("dapo", {GROUPS: "5"}, [f"{BATCH}=32"])


@pytest.mark.parametrize("value", ["0", "-4", "2.5", "few"])
def test_a_number_of_groups_is_whole(value):
    with pytest.raises(ValueError, match=f"groups_per_update='{value}' is not accepted: whole numbers above 0"):
        unit_words("grpo", {GROUPS: value}, [])


@pytest.mark.parametrize("recipe", names())
def test_every_recipe_takes_small_batches_and_only_those_that_drop_groups_generate_more(recipe):
    arm = Arm("name", recipe, 1, {GROUPS: "2"}, EqualCost("rollouts", 1000))
    config = compose_config(choose(arm.command([]), "cpu"))
    settings = Settings.from_config(config)
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (2, 2)
    assert config.data.gen_batch_size == (8 if settings.drops_groups else None)


def test_an_arm_may_have_an_oracle():
    arm = Arm("name", "strata", 1, {"goldilocks.prior": "oracle"}, EqualCost("rollouts", 1000))
    columns = ["goldilocks.strata.columns=[level]", "goldilocks.validate_by=[level]"]
    assert Settings.from_config(compose_config(choose(arm.command(columns), "cpu"))).policies.prior == "oracle"


def test_a_best_value_at_an_end_of_its_list_is_an_edge_and_one_within_is_not():
    grid = {"a.lr": ("3e-4", "1e-4", "2e-4"), GROUPS: ("2", "4", "8"), "loss": ("grpo", "gspo"), "one": ("1",)}
    chosen = {"a.lr": "3e-4", GROUPS: "4", "loss": "gspo", "one": "1"}
    assert edges(grid, "dapo", chosen) == [Edge("dapo", "a.lr", "3e-4", "highest")]
    assert edges(grid, "dapo", {**chosen, "a.lr": "2e-4", GROUPS: "2"}) == [Edge("dapo", GROUPS, "2", "lowest")]


@pytest.mark.parametrize("key", [GROUPS, BATCH, MINI_BATCH])
def test_one_group_is_the_least_there_can_be_and_no_edge(key):
    assert edges({key: ("1", "2", "4")}, "dapo", {key: "1"}) == []
    assert edges({key: ("1", "2", "4")}, "dapo", {key: "4"}) == [Edge("dapo", key, "4", "highest")]


@pytest.mark.parametrize(("groups", "answers", "found"), [("16", 1, 256), ("2", 1, 64), ("2", 2, 128), ("2", 8, 256)])
def test_trl_decodes_a_generation_batch_at_a_time_and_no_validation_in_a_few_slots(groups, answers, found):
    """A generation batch of DAPO is four prompts for each group, n is 8, and ``max_num_seqs`` is 256."""
    arm = Arm("name", "dapo", 1, {GROUPS: groups}, EqualCost("rollouts", 1000))
    own = ["trainer=trl", "actor_rollout_ref.rollout.name=transformers"]
    config = compose_config(choose(arm.command([*own, f"actor_rollout_ref.rollout.val_kwargs.n={answers}"]), "cpu"))
    assert slots(config) == found
