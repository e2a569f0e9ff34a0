"""Data and models that a config names are made the first time, and the config is told where they are."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from published_world import gsm8k_files, small_model
from run_files import write_records
from transformers import AutoTokenizer
from verl.tools.tool_registry import load_all_tools

from goldilocks.config.recipes import choose, compose_config, quoted
from goldilocks.config.sections import reward_calls
from goldilocks.launch import preflight
from goldilocks.tasks.published import Gsm8k
from goldilocks.tasks.tiny_model import tiny_model


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GOLDILOCKS_TASK", raising=False)


def composed(*words):
    config = compose_config(choose([*words, "actor_rollout_ref.model.path=/nowhere"], "cpu"))
    preflight.provide(config)
    return config


def rows(config, key="train_files"):
    return pq.read_table(config.data[key]).to_pylist()


def test_sums_are_made_once():
    first = composed("task=sums_small")
    assert len(rows(first)) == first.task.train == 4096
    before = Path(first.data.train_files).stat().st_mtime_ns
    assert Path(composed("task=sums_small").data.train_files).stat().st_mtime_ns == before


def test_a_column_that_the_data_do_not_have_is_refused_before_anything_starts():
    words = ["task=ladder_tiny", "task.train=6", "task.val=2"]
    preflight.check_columns(composed(*words, "goldilocks.strata.columns=[level,skill]"))
    with pytest.raises(
        ValueError, match=r"goldilocks.strata.columns='nope' is not accepted: a column of the data: .*level"
    ):
        preflight.check_columns(composed(*words, "goldilocks.strata.columns=[level,nope]"))
    for fine in ("goldilocks.strata=null", "data.train_files=[/nowhere/a.jsonl]", "+data.custom_cls.path=mine.py"):
        preflight.check_columns(composed(*words, "goldilocks.strata.columns=[nope]", fine))


def test_generators_and_their_knobs_are_keys_and_each_choice_has_data_of_its_own():
    small = ["task.train=6", "task.val=2"]
    alone = composed("task=reasoning_gym", *small)
    path = alone.data.train_files
    assert {row["extra_info"]["generator"] for row in rows(alone)} == {"leg_counting"}
    mixture = "task.generators={chain_sum:{max_terms:3,share:2},leg_counting:{max_animals:3}}"
    mixed = composed("task=reasoning_gym", mixture, *small)
    assert [row["extra_info"]["generator"] for row in rows(mixed)].count("chain_sum") == 4
    assert mixed.data.train_files != path


def test_data_of_ones_own_are_left_alone(tmp_path):
    config = composed("task=sums", "data.train_files=a.parquet", "data.val_files=b.parquet")
    assert config.data.train_files == "a.parquet"
    assert not list(tmp_path.glob("goldilocks/sums-*"))


def test_a_folder_of_ones_own_has_the_data(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDILOCKS_TASK", str(tmp_path / "mine"))
    assert composed("task=ladder_tiny", "task.train=6").data.val_files == str(tmp_path / "mine/data/val.parquet")
    assert len(rows(composed("task=ladder_tiny", f"task.folder={tmp_path}/other", "task.train=6"))) == 6


@pytest.mark.parametrize(
    ("there", "read"), [(["test"], "test"), (["val"], "val"), (["val", "test"], "val"), ([], "val")]
)
def test_gsm8k_of_verls_own_preparation_is_read_and_what_we_made_comes_first(tmp_path, monkeypatch, there, read):
    monkeypatch.setenv("GSM8K", str(tmp_path))
    for name in there:
        (tmp_path / f"{name}.parquet").touch()
    assert composed("task=gsm8k").data.val_files == str(tmp_path / f"{read}.parquet")


@pytest.mark.parametrize("folder", ["{home}/gsm8k/", "~/gsm8k", "~/gsm8k/"])
def test_gsm8k_of_verls_own_preparation_is_found_however_its_folder_is_written(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GSM8K", folder.format(home=tmp_path))
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.parquet").touch()
    assert composed("task=gsm8k").data.val_files == str(tmp_path / "gsm8k" / "test.parquet")


def test_a_model_by_name_becomes_its_folder(tmp_path):
    kept = tmp_path / "goldilocks" / "smollm2-hub"
    kept.mkdir(parents=True)
    config = compose_config(choose(["task=arithmetic", "actor_rollout_ref.model.path=smollm2"], "cpu"))
    preflight.provide(config)
    assert config.actor_rollout_ref.model.path == str(kept)
    assert config.critic.model.path == str(kept)


def test_a_tiny_model_by_name_is_the_one_that_is_shipped():
    config = compose_config(choose(["task=calculator"], "cpu"))
    preflight.provide(config)
    assert config.actor_rollout_ref.model.path == str(tiny_model("calculator"))


def gsm8k_small(*words: str):
    config = compose_config(choose(["task=gsm8k_small", "task.warm_start.batch=2", *words], "cpu"))
    preflight.provide(config)
    return config


def test_a_warm_start_is_given_once_and_its_half_is_never_trained(tmp_path, capsys):
    words = [gsm8k_files(tmp_path / "gsm8k"), small_model(tmp_path / "model"), "task.warm_start.steps=1"]
    config = gsm8k_small(*words)
    assert "model has had 1 × 2 lessons" in capsys.readouterr().err
    half = {row["prompt"][0]["content"] for row in rows(config)}
    task = Gsm8k(str(tmp_path / "gsm8k"), lessons=True)
    lessons = {one.question for one in itertools.islice(task.lessons(random.Random(0)), 24)}
    assert not half & lessons
    assert min(len(half), len(lessons)) > 0
    assert len(half | lessons) == 12
    assert len(rows(config, "val_files")) == 12

    taught = config.actor_rollout_ref.model.path
    assert Path(taught).is_relative_to(config.task.folder)
    assert gsm8k_small(*words).actor_rollout_ref.model.path == taught
    preflight.provide(config)
    assert config.actor_rollout_ref.model.path == taught
    assert capsys.readouterr().err == ""

    assert gsm8k_small(*words, "task.warm_start.seed=1").actor_rollout_ref.model.path != taught
    small_model(tmp_path / "model")  # written anew
    assert gsm8k_small(*words).actor_rollout_ref.model.path != taught
    without = gsm8k_small(*words, "task.warm_start=null")
    assert len(rows(without)) == 12
    assert without.actor_rollout_ref.model.path == str(tmp_path / "model")


def test_a_model_below_the_users_home_has_its_lessons_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    small_model(tmp_path / "model")
    named = ["actor_rollout_ref.model.path='~/model'", "task.warm_start.steps=1"]
    config = gsm8k_small(gsm8k_files(tmp_path / "gsm8k"), *named)
    assert (Path(config.actor_rollout_ref.model.path) / "config.json").is_file()


def test_other_files_in_the_folder_are_other_data(tmp_path):
    word = gsm8k_files(tmp_path / "gsm8k")
    first = composed("task=gsm8k_small", word, "task.warm_start=null").task.folder
    with (tmp_path / "gsm8k" / "train.jsonl").open("a") as file:
        file.write('{"question": "What is 2 and 3?", "answer": "#### 5"}\n')
    second = composed("task=gsm8k_small", word, "task.warm_start=null")
    assert second.task.folder != first
    assert len(rows(second)) == 13


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "task.data=None is not accepted: the folder with the published data"),
        (["task.data=/nowhere"], "task.data='/nowhere' is not accepted: a file, or a folder with a file named *train*"),
        (["task.data=here", "task.train=0"], "task.train=0 is not accepted: 1 or more problems"),
        (["task.data=here", "task.val=many"], "task.val='many' is not accepted: 1 or more problems"),
        (["task.data=here", "task.warm_start.steps=0"], "task.warm_start.steps=0 is not accepted: 1 or more"),
        (["task.data=here", "task.warm_start.lr=quick"], "task.warm_start.lr='quick' is not accepted: a number"),
    ],
)
def test_what_a_published_task_needs_is_named_by_its_key(words, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        preflight.locate(compose_config(choose(["task=gsm8k_small", *words], "cpu")))


def test_math_is_graded_within_its_own_time_and_by_its_own_module(tmp_path):
    config = compose_config(choose(["task=math", f"task.data={tmp_path}"], "cpu"))
    calls = reward_calls(config)
    assert (calls.timeout, calls.on_failure) == (10, "zero")
    assert config.goldilocks.validate_by == ["level", "type"]
    assert config.reward.custom_reward_function.path == "pkg://goldilocks.tasks.published"
    assert reward_calls(compose_config(choose(["task=math", "goldilocks.rewards.timeout=3"], "cpu"))).timeout == 3


def test_the_calculators_settings_reach_the_tool_that_verl_makes(monkeypatch):
    monkeypatch.setattr("builtins.print", lambda *_: None)  # verl prints every tool
    config = composed("task=calculator", "calculator.seconds=0.5", "calculator.fail_every=3")
    assert {row["data_source"] for row in rows(config)} == {"goldilocks/calculator"}
    (tool,) = load_all_tools(config.actor_rollout_ref.rollout.multi_turn.tool_config_path, None)
    assert (tool.name, tool.config["seconds"], tool.config["fail_every"]) == ("calculator", "0.5", "3")
    with pytest.raises(ValueError, match=r"calculator\.seconds=-1 is not accepted: 0 or more"):
        composed("task=calculator", "calculator.seconds=-1")


def test_prompts_are_counted_by_the_tokenizer_and_the_template_that_the_config_names(tmp_path):
    kept = AutoTokenizer.from_pretrained(tiny_model("calculator"))
    kept.chat_template = None
    kept.save_pretrained(tmp_path / "base")
    write_records(file := tmp_path / "data.parquet", [{"prompt": [{"role": "user", "content": "1 + 1 ="}]}])
    template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    words = [f"data.train_files={file}", f"data.val_files={file}", "actor_rollout_ref.model.path=/nowhere"]
    words += [f"actor_rollout_ref.model.tokenizer_path={tmp_path / 'base'}", "data.max_prompt_length=2"]
    config = compose_config(choose([*words, f"actor_rollout_ref.model.custom_chat_template={quoted(template)}"], "cpu"))
    with pytest.raises(ValueError, match=r"max_prompt_length=2 is not accepted: \d+, the tokens of the longest prompt"):
        preflight.check_prompts(config)
    config.actor_rollout_ref.model.custom_chat_template = "{% if long %}" + template + "{% else %}1{% endif %}"
    preflight.check_prompts(config)
    config.data.apply_chat_template_kwargs = {"long": True, "tokenize": False}  # verl takes the latter out too
    with pytest.raises(ValueError, match=r"max_prompt_length=2 is not accepted"):
        preflight.check_prompts(config)
