"""Every script composes to the run it names, from any folder; nothing is trained here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from goldilocks.cli import main, parse
from goldilocks.config.recipes import choose, compose_config

ROOT = Path(__file__).parents[3]

# What documents the 3B run, key by key.
OF_3B = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-3B-Instruct",
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.weight_decay": 0.1,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.rollout.n": 16,
    "algorithm.use_kl_in_reward": False,
    "algorithm.filter_groups.enable": True,
    "data.train_batch_size": 512,
    "data.max_response_length": 8192,
}
GSPO_3B = {
    **OF_3B,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    "actor_rollout_ref.actor.clip_ratio_low": 3e-4,
    "actor_rollout_ref.actor.clip_ratio_high": 4e-4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": -1,
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.05,
    "actor_rollout_ref.actor.entropy_coeff": 0,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "algorithm.adv_estimator": "grpo",
    "algorithm.filter_groups.metric": "seq_reward",
    "algorithm.filter_groups.max_num_gen_batches": 5,
    "data.train_files": "/elsewhere/data/gsm8k/train.parquet",
    "data.val_files": "/elsewhere/data/gsm8k/val.parquet",
    "data.gen_batch_size": None,
    "data.max_prompt_length": 2048,
    "trainer.total_training_steps": 500,
    "trainer.n_gpus_per_node": 8,
    "trainer.use_v1": True,
    "trainer.v1.trainer_mode": "goldilocks",
}
DAPO_3B = {
    **OF_3B,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 10,
    "algorithm.filter_groups.metric": "acc",
    "algorithm.filter_groups.max_num_gen_batches": 10,
    "data.gen_batch_size": 1536,
    "reward.reward_manager.name": "dapo",
    "reward.reward_kwargs.max_resp_len": 8192,
    "reward.reward_kwargs.overlong_buffer_cfg": {"enable": True, "len": 4096, "penalty_factor": 1.0, "log": True},
}
ADAPTIVE = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B-Instruct",
    "adaptive_rollout.enable": True,
    "adaptive_rollout.max_n": 128,
    "adaptive_rollout.rollouts_per_batch": 8,
    "adaptive_rollout.positive_threshold": 0.5,
    "adaptive_rollout.min_rollouts": 2,
    "adaptive_rollout.stop": "positive",
    "algorithm.filter_groups.enable": False,
    "data.train_batch_size": 32,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
}
BASELINE = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B-Instruct",
    "actor_rollout_ref.rollout.n": 5,
    "adaptive_rollout.enable": False,
    "algorithm.filter_groups.enable": False,
    "data.train_batch_size": 32,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
}
SCRIPTS: dict[str, dict[str, Any]] = {
    "recipe/gspo/gspo_dynamic_sampling_3b_math.sh": GSPO_3B,
    "recipe/gspo/test_gspo_3b_math.sh": GSPO_3B | {"algorithm.filter_groups.enable": False},
    "recipe/dapo/dapo_3b_math.sh": DAPO_3B,
    "examples/grpo_trainer/run_adaptive_rollout_experiment.sh": ADAPTIVE,
    "examples/grpo_trainer/run_baseline_fixed_n5.sh": BASELINE,
}


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has nothing to do with the scripts, of a user with another home."""
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.delenv("GSM8K", raising=False)
    monkeypatch.setenv("HOME", "/elsewhere")
    folder = tmp_path / "somewhere"
    folder.mkdir()
    return folder


def printed(command: list[str], folder: Path, first_on_the_path: Path) -> str:
    """What a script prints that finds ``goldilocks`` in this folder."""
    path = f"{first_on_the_path}:{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(script: str, somewhere: Path, *words: str) -> DictConfig:
    """What a script would train: the words it has for ``goldilocks train``, composed here to save importing again."""
    echo = somewhere.parent / "goldilocks"
    echo.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    echo.chmod(0o700)
    command, *rest = printed(["bash", str(ROOT / script), *words], somewhere, echo.parent).splitlines()
    assert command == "train"
    return compose_config(choose(rest, "cpu"))


def differing(config: DictConfig, wanted: dict[str, Any]) -> dict[str, Any]:
    """The keys that are not as wanted, with what they are."""
    found = {key: OmegaConf.select(config, key, throw_on_missing=True) for key in wanted}
    return {key: value for key, value in found.items() if value != wanted[key]}


@pytest.mark.parametrize(("script", "wanted"), SCRIPTS.items(), ids=[Path(script).stem for script in SCRIPTS])
def test_a_script_without_words_is_the_run_it_names(script: str, wanted: dict[str, Any], somewhere: Path) -> None:
    assert differing(trained(script, somewhere, "device=cuda"), wanted) == {}


def test_the_user_has_the_last_word_whatever_the_model(somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "recipe/dapo/dapo_3b_math.sh"
    monkeypatch.setenv("MODEL", "tiny")
    tiny = trained(script, somewhere, "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert tiny.actor_rollout_ref.actor.ppo_mini_batch_size == 4
    assert tiny.data.max_response_length == tiny.reward.reward_kwargs.max_resp_len == 12
    monkeypatch.setenv("MODEL", "Qwen/Qwen2.5-7B")
    monkeypatch.setenv("GSM8K", "/mnt/gsm8k")
    other = trained(script, somewhere, "data.gen_batch_size=600")
    assert other.actor_rollout_ref.model.path == "Qwen/Qwen2.5-7B"
    assert other.data.gen_batch_size == 600
    assert other.data.train_files == "/mnt/gsm8k/train.parquet"


def test_every_script_can_be_run_as_it_is() -> None:
    scripts = [*ROOT.glob("recipe/*/*.sh"), *ROOT.glob("examples/*/run_*.sh")]
    assert len(scripts) == len(SCRIPTS) + 1  # the comparison, which trains two of them
    for script in scripts:
        assert os.access(script, os.X_OK), script
        assert "set -euo pipefail" in script.read_text(), script


def test_the_comparison_knows_three_words(somewhere: Path) -> None:
    script = "examples/grpo_trainer/run_adaptive_vs_baseline_comparison.sh"
    assert differing(trained(script, somewhere, "baseline", "device=cuda"), BASELINE) == {}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", ROOT / script, "all"], env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "both|adaptive|baseline" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["grpo", "a=1", "--name", "X", "b=2"],
        ["--name", "X", "grpo", "a=1", "b=2"],
        ["grpo", "--name", "X", "a=1", "b=2"],
        ["grpo", "a=1", "b=2", "--name", "X"],
    ],
)
def test_options_stand_before_between_and_behind_the_words(words: list[str]) -> None:
    args = parse(["train", *words])
    assert (args.command, args.words, args.name) == ("train", ["grpo", "a=1", "b=2"], "X")


@pytest.mark.parametrize("words", [["train", "grpo", "--no-such-option"], ["data", "make"], ["--no-such-option"]])
def test_what_is_no_option_is_status_2(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "usage: goldilocks" in capsys.readouterr().err
