"""Data and models that a config names are made the first time, and the config is told where they are."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
from verl.tools.tool_registry import load_all_tools

from goldilocks.launch import preflight
from goldilocks.launch.recipe import choose, compose_config


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for task in ("ARITHMETIC", "SUMS", "LADDER", "CALCULATOR", "REASONING_GYM"):
        monkeypatch.delenv(f"GOLDILOCKS_{task}", raising=False)


def composed(*words):
    config = compose_config(choose([*words, "actor_rollout_ref.model.path=/nowhere"], "cpu"))
    preflight.provide(config)
    return config


def rows(config, key="train_files"):
    return pq.read_table(config.data[key]).to_pylist()


def test_sums_are_made_once():
    first = composed("task=sums_small")
    assert len(rows(first)) == preflight.SIZES["sums"][0]
    before = preflight.folder("sums").stat().st_mtime_ns
    preflight.provide(first)
    assert preflight.folder("sums").stat().st_mtime_ns == before


def test_generators_and_their_knobs_are_keys_and_each_choice_has_data_of_its_own():
    small = ["reasoning_gym.train=6", "reasoning_gym.val=2"]
    alone = composed("task=reasoning_gym", *small)
    path = alone.data.train_files
    assert {row["extra_info"]["generator"] for row in rows(alone)} == {"leg_counting"}
    mixture = "reasoning_gym.generators={chain_sum:{max_terms:3,share:2},leg_counting:{max_animals:3}}"
    mixed = composed("task=reasoning_gym", mixture, *small)
    assert [row["extra_info"]["generator"] for row in rows(mixed)].count("chain_sum") == 4
    assert mixed.data.train_files != path


def test_data_of_ones_own_are_left_alone(tmp_path):
    config = composed("task=sums", "data.train_files=a.parquet", "data.val_files=b.parquet")
    assert config.data.train_files == "a.parquet"
    assert not list(tmp_path.glob("goldilocks/sums-*"))


@pytest.mark.parametrize(
    ("there", "read"), [(["test"], "test"), (["val"], "val"), (["val", "test"], "val"), ([], "val")]
)
def test_gsm8k_of_verls_own_preparation_is_read_and_what_we_made_comes_first(tmp_path, monkeypatch, there, read):
    monkeypatch.setenv("GSM8K", str(tmp_path))
    for name in there:
        (tmp_path / f"{name}.parquet").touch()
    assert composed("task=gsm8k").data.val_files == str(tmp_path / f"{read}.parquet")


def test_a_model_by_name_becomes_its_folder(tmp_path):
    kept = tmp_path / "goldilocks" / "smollm2-hub"
    kept.mkdir(parents=True)
    config = compose_config(choose(["task=arithmetic", "actor_rollout_ref.model.path=smollm2"], "cpu"))
    preflight.provide(config)
    assert config.actor_rollout_ref.model.path == str(kept)
    assert config.critic.model.path == str(kept)


@pytest.mark.parametrize("origin", ["hub", "gguf"])
def test_a_model_taught_from_other_weights_has_another_folder(tmp_path, monkeypatch, origin):
    monkeypatch.setenv("GOLDILOCKS_LADDER", str(tmp_path / "ladder"))
    monkeypatch.setitem(preflight.SIZES, "ladder", (4, 4))
    for kept in (tmp_path / "goldilocks", tmp_path / "ladder"):
        (kept / f"smollm2-{origin}").mkdir(parents=True)
    config = compose_config(choose(["task=ladder"], "cpu"))
    preflight.provide(config)
    assert config.actor_rollout_ref.model.path == str(tmp_path / "ladder" / f"smollm2-{origin}")


def test_the_calculators_settings_reach_the_tool_that_verl_makes(monkeypatch):
    monkeypatch.setattr("builtins.print", lambda *_: None)  # verl prints every tool
    config = composed("task=calculator", "calculator.seconds=0.5", "calculator.fail_every=3")
    assert {row["data_source"] for row in rows(config)} == {"goldilocks/calculator"}
    (tool,) = load_all_tools(config.actor_rollout_ref.rollout.multi_turn.tool_config_path, None)
    assert (tool.name, tool.config["seconds"], tool.config["fail_every"]) == ("calculator", "0.5", "3")
    with pytest.raises(ValueError, match=r"calculator\.seconds=-1 is not accepted: 0 or more"):
        composed("task=calculator", "calculator.seconds=-1")
