"""verl accepts the configs of the devices, and what our rollout server cannot do is refused by its key."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas
import pytest
from transformers import MistralConfig, Qwen2VLConfig

import goldilocks.config
from goldilocks.engine.cpu import DEVICES
from goldilocks.verl import plugin
from goldilocks.verl.checks import check_run

plugin.additions()

GROUP = Path(goldilocks.config.__file__).parent / "device"
SMALL = [
    "actor_rollout_ref.model.path=/model",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "data.train_batch_size=8",
]


def _compose(*overrides: str) -> Any:
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*SMALL, *overrides])


def _validate(config: Any) -> None:
    """Check a config as a run does before it starts anything: by our rules, then by verl's."""
    from verl.utils.config import validate_config

    check_run(config)
    validate_config(config=config, use_reference_policy=True, use_critic=False)


def test_there_is_a_config_for_every_device() -> None:
    assert {path.stem for path in GROUP.glob("*.yaml")} == set(DEVICES)


@pytest.mark.parametrize("device", DEVICES)
def test_verl_accepts_the_config_of_a_device(device: str) -> None:
    config = _compose(f"+device={device}")
    _validate(config)
    assert config.trainer.device == device
    assert config.critic.model.path == "/model"
    assert not config.actor_rollout_ref.model.trust_remote_code


def test_what_the_command_line_says_wins_over_the_device() -> None:
    config = _compose("+device=cpu", "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.name=vllm")
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert config.ray_kwargs.ray_init.num_gpus == 2


def test_tensor_parallel_rollouts_of_our_server_alone_are_refused_before_anything_starts() -> None:
    parallel = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    with pytest.raises(ValueError, match=r"rollout\.tensor_model_parallel_size=2 .* use rollout\.name=vllm"):
        _validate(_compose("+device=cpu", *parallel))
    _validate(_compose("+device=cuda", "actor_rollout_ref.rollout.name=vllm", *parallel))


@pytest.mark.parametrize("merge", [False, True])
def test_our_rollout_server_takes_adapters_merged_whatever_the_config_says(merge: bool) -> None:
    lora = ("actor_rollout_ref.model.lora_rank=8", f"actor_rollout_ref.model.lora.merge={merge}")
    _validate(_compose("+device=cpu", *lora))


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_between_devices_adapters_are_merged_with_every_engine(engine: str) -> None:
    """verl sends the base weights alone otherwise."""
    from goldilocks.verl.update.async_trainer import prepare

    apart = ["rollout.nnodes=1", "rollout.checkpoint_engine.backend=ray", f"rollout.name={engine}", "model.lora_rank=8"]
    config = _compose("+device=cpu", *(f"actor_rollout_ref.{key}" for key in apart))
    assert not config.actor_rollout_ref.model.lora.merge
    prepare(config)
    assert config.actor_rollout_ref.model.lora.merge


def test_models_and_data_with_pictures_are_refused_before_anything_starts(tmp_path: Path) -> None:
    Qwen2VLConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.path=.* a model of text alone, which qwen2_vl is not, .*name=vllm"):
        _validate(_compose("+device=cpu", f"actor_rollout_ref.model.path={tmp_path}"))
    file = tmp_path / "train.parquet"
    pandas.DataFrame({"prompt": ["What is it?"], "images": [[b"a picture"]]}).to_parquet(file)
    with pytest.raises(ValueError, match=r"data\.image_key='images' is not accepted: .* takes text; .*name=vllm"):
        _validate(_compose("+device=cpu", f"data.train_files={file}"))
    _validate(_compose("+device=cpu", f"data.train_files=[{file}]", "data.image_key=pictures"))


@pytest.mark.parametrize("images", [[[], None], [None, None]])
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_an_empty_column_of_images_is_text(tmp_path: Path, engine: str, images: list[Any]) -> None:
    file = tmp_path / "train.parquet"
    pandas.DataFrame({"prompt": ["What is it?", "And this?"], "images": images}).to_parquet(file)
    _validate(_compose("+device=cpu", f"data.train_files={file}", f"actor_rollout_ref.rollout.name={engine}"))


def test_images_that_verl_could_not_read_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl drops every such prompt, or fails at the first one."""
    file, model = tmp_path / "train.parquet", tmp_path / "model"
    pandas.DataFrame({"prompt": ["What is it?"], "images": [[b"a picture"]]}).to_parquet(file)
    Qwen2VLConfig().save_pretrained(model)
    words = ["+device=cpu", f"data.train_files={file}", "actor_rollout_ref.rollout.name=vllm"]
    refused = rf"data\.image_key='images' is not accepted: a name that is no column of {file}, since verl "
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", None)
    with pytest.raises(ValueError, match=rf"{refused}reads images with qwen_vl_utils and torchvision, which fail here"):
        _validate(_compose(*words))
    _validate(_compose(*words, "data.custom_cls.path=mine.py", "data.custom_cls.name=Mine"))
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", ModuleType("qwen_vl_utils"))
    with pytest.raises(ValueError, match=rf"{refused}makes no processor of {model} \(Failed to create processor: "):
        _validate(_compose(*words, f"actor_rollout_ref.model.path={model}"))
    _validate(_compose(*words))  # a model of the hub is not looked at


def test_texts_longer_than_a_models_window_are_refused_before_anything_starts(tmp_path: Path) -> None:
    MistralConfig(sliding_window=128).save_pretrained(tmp_path)
    given = ["+device=cpu", f"actor_rollout_ref.model.path={tmp_path}", "data.max_prompt_length=64"]
    _validate(_compose(*given, "data.max_response_length=64"))
    name = r"actor_rollout_ref\.rollout\."
    with pytest.raises(ValueError, match=rf"{name}prompt_length \+ response_length=129 .* sliding_window=128 or less"):
        _validate(_compose(*given, "data.max_response_length=65"))
    with pytest.raises(ValueError, match=rf"{name}max_model_len=200 .* the model's sliding_window=128 or less"):
        _validate(_compose(*given, "data.max_response_length=64", "actor_rollout_ref.rollout.max_model_len=200"))
    wider = "+actor_rollout_ref.model.override_config.sliding_window=200"
    _validate(_compose(*given, wider, "data.max_response_length=65"))


@pytest.mark.parametrize(("name", "freed"), [("transformers", False), ("vllm", True), ("sglang", True)])
def test_on_a_gpu_only_our_engine_keeps_its_cache_between_steps(name: str, freed: bool) -> None:
    config = _compose("+device=cuda", f"actor_rollout_ref.rollout.name={name}")
    assert config.actor_rollout_ref.rollout.free_cache_engine is freed
