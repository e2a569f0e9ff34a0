"""A recipe has one definition: ``goldilocks train`` and ``goldilocks simulate`` build the same policies from it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from goldilocks.config import recipes
from goldilocks.config.recipes import about, choose, compose_config, names, read_recipe, verl_defaults
from goldilocks.config.settings import Settings
from goldilocks.dotted_keys import dotted_keys, merged, value_at, with_value
from goldilocks.lab.simulate import EngineConfig, Setup, recipe_settings
from goldilocks.launch.on_trl import leaves

LIFTED = {"max_num_gen_batches": 0}


def described(part: object) -> tuple[type, str]:
    """A part of a policy by its class and every value it holds; arrays cannot be compared with ``==``."""
    return type(part), repr(vars(part))


@functools.cache
def composed(recipe: str) -> DictConfig:
    """What ``goldilocks train`` makes of a recipe; not to be written to, since it is made once."""
    return compose_config(choose([recipe], "cpu"))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own.yaml"


@pytest.mark.parametrize("name", names())
def test_train_and_simulate_read_the_same_keys_and_build_the_same_policies(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOLDILOCKS_TASK", "/nowhere")
    config = composed(choose([name], "cpu").recipe)
    assert config.trainer.device == "cpu"
    read = read_recipe(name)  # without Hydra
    for key in dotted_keys(read):
        if not isinstance(value_at(read, key), dict):
            assert value_at(config, key) == value_at(read, key), key
    trained = Settings.from_config(config)
    data = config.data
    setup = Setup(target_groups=data.train_batch_size, engine=EngineConfig(max_tokens=data.max_response_length))
    simulated = recipe_settings(name, setup)
    for part in ("selector", "allocator", "filter", "surplus", "budget"):
        assert described(getattr(simulated, part)()) == described(getattr(trained, part)()), part
    assert vars(simulated.limits()) == {**vars(trained.limits()), **LIFTED}
    assert simulated.policies == trained.policies
    assert simulated.adaptive == trained.adaptive
    assert (simulated.n, simulated.train_batch_size) == (trained.n, trained.train_batch_size)


def test_the_default_recipe_comes_first_then_those_that_are_advised_then_those_for_studies() -> None:
    assert [name for name in names() if not about(name).endswith(".")] == [], "each says in a sentence what it does"
    assert names()[0] == recipes.DEFAULT
    assert names()[:5] == ["grpo", "dapo", "gspo", "adaptive", "frontier"]
    assert names()[5:] == sorted(names()[5:])
    assert ", frontier; for studies: contrast, " in recipes.listed()


def test_a_file_builds_on_a_recipe_and_comes_before_or_after_it(own: Path) -> None:
    own.write_text("defaults: [/recipe/dapo]\nalgorithm: {filter_groups: {metric: score}}\n")
    assert value_at(read_recipe(str(own)), "algorithm.filter_groups") == {
        **value_at(read_recipe("dapo"), "algorithm.filter_groups"),
        "metric": "score",
    }
    own.write_text("defaults: [_self_, {/recipe: dapo}]\nalgorithm: {filter_groups: {metric: score}}\n")
    assert value_at(read_recipe(str(own)), "algorithm.filter_groups.metric") == "acc"


@pytest.mark.parametrize("entry", ["dapo", "/recipe/dapo", "{/recipe: dapo}"])
@pytest.mark.parametrize("name", ["own.yaml", "dapo.yaml"])
def test_a_file_builds_on_a_recipe_by_its_name_in_train_and_in_simulate(entry: str, name: str, tmp_path: Path) -> None:
    own = tmp_path / name
    own.write_text(f"defaults: [{entry}, _self_]\nalgorithm: {{filter_groups: {{metric: score}}}}\n")
    wanted = merged(read_recipe("dapo"), {"algorithm": {"filter_groups": {"metric": "score"}}})
    assert read_recipe(str(own)) == wanted
    config = compose_config(choose([str(own)], "cpu"))
    groups = value_at(wanted, "algorithm.filter_groups")
    assert {key: value_at(config, f"algorithm.filter_groups.{key}") for key in groups} == groups


def test_a_file_builds_on_files_beside_it_which_come_before_recipes(own: Path) -> None:
    own.write_text("defaults: [base, greso, _self_]\ndata: {train_batch_size: 7}\n")
    own.with_name("base.yaml").write_text("defaults: [dapo, _self_]\nalgorithm: {filter_groups: {metric: score}}\n")
    own.with_name("greso.yaml").write_text("goldilocks: {max_retries: 5}\n")
    config, read = compose_config(choose([str(own)], "cpu")), read_recipe(str(own))
    for key, value in (
        ("algorithm.filter_groups.enable", True),
        ("algorithm.filter_groups.metric", "score"),
        ("goldilocks.max_retries", 5),
        ("goldilocks.selector", "uniform"),
        ("data.train_batch_size", 7),
    ):
        assert value_at(config, key) == value
        assert value_at(read, key) == value


def test_a_file_that_builds_on_no_recipe_builds_on_the_default_one(own: Path) -> None:
    own.write_text("defaults: [base, _self_]\ngoldilocks: {selector: thompson}\n")
    own.with_name("base.yaml").write_text("data: {train_batch_size: 7}\n")
    chosen = {"goldilocks": {"selector": "thompson"}, "data": {"train_batch_size": 7}}
    assert read_recipe(str(own)) == merged(read_recipe(recipes.DEFAULT), chosen)
    config, default = leaves(compose_config(choose([str(own)], "cpu"))), leaves(composed(recipes.DEFAULT))
    differing = {key: value for key, value in config.items() if value != default.get(key)}
    assert differing == {"data.train_batch_size": 7, "goldilocks.selector": "thompson"}


def test_a_file_on_our_keys_alone_is_simulated_with_verls_number_of_rollouts(own: Path) -> None:
    own.write_text("defaults: [/goldilocks/defaults]\ngoldilocks: {selector: thompson}\n")
    config = compose_config(choose([str(own)], "cpu"))
    assert recipe_settings(str(own), Setup()).n == config.actor_rollout_ref.rollout.n == 1


def test_the_sections_of_a_recipe_are_those_of_verl_and_ours() -> None:
    assert sorted(recipes.VERLS) == sorted(verl_defaults())
    used = {section for name in names("task") for section in recipes._read(recipes.CONFIG / f"task/{name}.yaml", [])}
    assert set(recipes.OURS) <= used | set(read_recipe("grpo"))


@pytest.mark.parametrize(
    "command",
    [["train"], ["simulate", "--policy"], ["compare", "--budget", "rollouts=8", "--seeds", "1", "grpo"]],
    ids=lambda words: words[0],
)
def test_a_section_that_nobody_reads_is_refused_with_the_nearest(
    command: list[str], own: Path, refused: Callable[[list[str]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    own.write_text("defaults: [dapo]\ngoldilocs: {selector: thompson}\n")
    assert refused([*command, str(own)]).startswith(
        f"goldilocks: recipe={str(own)!r}: 'goldilocs' is not a section (did you mean 'goldilocks'?)"
    )
    assert list(own.parent.iterdir()) == [own]


def test_files_that_build_on_each_other_are_refused(own: Path) -> None:
    own.write_text("defaults: [other, _self_]\na: 1\n")
    own.with_name("other.yaml").write_text("defaults: [own, _self_]\nb: 1\n")
    for read in (read_recipe, lambda file: compose_config(choose([file], "cpu"))):
        with pytest.raises(ValueError, match="defaults go in a circle: own, other, own"):
            read(str(own))


def test_numbers_are_read_as_hydra_reads_them(own: Path) -> None:
    own.write_text("data: {a: 1e-3, b: 3.0e-4, c: -2E5, d: 12, e: 1.2.3}\n")
    assert read_recipe(str(own))["data"] == {"a": 1e-3, "b": 3e-4, "c": -2e5, "d": 12, "e": "1.2.3"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("- a", "has no keys"),
        ("", "has no keys"),
        ("data: 5", r"own.yaml': data=5 is not accepted: keys with their values"),
        ("defaults: [dappo]\na: 1", r"defaults has 'dappo', which is not known \(did you mean 'dapo'\?\); a recipe"),
        ("defaults: [/recipe/dappo]\na: 1", "defaults has '/recipe/dappo', which is not a file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(own: Path, text: str, message: str) -> None:
    own.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_recipe(str(own))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("dappo", r"recipe='dappo' is not accepted: one of grpo, dapo, .*did you mean 'dapo'"),
        ("no/such.yaml", r"recipe='no/such.yaml' is not accepted: a file that is there"),
    ],
)
def test_a_recipe_that_is_not_there_is_answered_with_those_that_are(recipe: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_recipe(recipe)


def test_nested_mappings_by_dotted_keys() -> None:
    config = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert list(dotted_keys(config)) == ["a", "a.b", "a.c", "a.c.d", "e"]
    assert value_at(config, "a.c.d") == 2
    assert value_at(config, "a.b.d") is None
    assert with_value(config, "a.c.d", 5) == {"a": {"b": 1, "c": {"d": 5}}, "e": 3}
    assert with_value(config, "e.f", 5)["e"] == {"f": 5}
    assert merged(config, {"a": {"c": {"f": 6}}, "e": {}}) == {"a": {"b": 1, "c": {"d": 2, "f": 6}}, "e": {}}
