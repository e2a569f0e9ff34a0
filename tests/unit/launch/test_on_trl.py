"""verl's keys said in TRL's words: each is translated, or refused by its name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from goldilocks.config.recipes import choose, compose_config, names, verl_defaults
from goldilocks.launch import on_trl
from goldilocks.launch.on_trl import dataset

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))

OF_LAUNCH = [f"{ROLLOUT}.name=transformers", "trainer.logger=[console,file]"]


def composed(*words: str, recipe: str = "grpo") -> DictConfig:
    return compose_config(choose([recipe, "trainer=trl", *words], "cpu"), OF_LAUNCH)


@pytest.mark.parametrize(
    ("word", "accepted"),
    [
        (f"{MODEL}.lora.rank=8", "0"),
        (f"{MODEL}.trust_remote_code=true", "False"),
        (f"{MODEL}.use_liger=true", "False"),
        (f"{ACTOR}.grad_clip=0.5", "1.0"),  # verl's own workers read optim.clip_grad
        (f"{ACTOR}.clip_ratio=0.1", "0.2"),
        (f"{ACTOR}.kl_loss_type=mse", "'low_var_kl'"),
        (f"{ACTOR}.shuffle=true", "False"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum", "token-mean or seq-mean-token-mean or seq-mean-token-sum-norm"),
        (f"{ACTOR}.policy_loss.loss_mode=clip_cov", "vanilla or gspo"),
        (f"{ACTOR}.optim.optimizer=Muon", "'AdamW'"),
        (f"{ACTOR}.optim.lr_scheduler_type=linear", "constant or cosine"),
        (f"{ACTOR}.fsdp_config.param_offload=true", "False"),
        (f"{ACTOR}.fsdp_config.dtype=float16", "'bfloat16'"),
        (f"{ROLLOUT}.dtype=float16", "bfloat16 or float32"),
        (f"{ROLLOUT}.name=vllm", "transformers or hf"),
        (f"{ROLLOUT}.tensor_model_parallel_size=4", "1 or 2"),
        (f"{ROLLOUT}.val_kwargs.temperature=0.6", "0"),
        (f"{ROLLOUT}.multi_turn.enable=true", "False"),
        (f"{ROLLOUT}.seed=7", "42"),
        (f"{ROLLOUT}.prompt_length=3", "'${oc.select:data.max_prompt_length,512}'"),
        ("data.truncation=left", "'error'"),
        ("data.custom_cls.path=mine.py", "None"),
        ("+data.apply_chat_template_kwargs.enable_thinking=false", "TRL does not know this key"),
        ("algorithm.rollout_correction.rollout_is=token", "None"),
        ("algorithm.rollout_correction.bypass_mode=true", "False"),
        ("algorithm.adv_estimator=rloo", "grpo"),
        ("algorithm.use_kl_in_reward=true", "False"),
        ("reward.reward_manager.name=dapo", "'naive'"),
        ("reward.reward_model.enable=true", "False"),
        ("trainer.val_only=true", "False"),
        ("trainer.logger=[wandb]", "console and file"),
        ("trainer.n_gpus_per_node=2", "1"),
        ("trainer.nnodes=2", "1"),
        ("trainer.v1.trainer_mode=goldilocks_async", "goldilocks or sync"),
        ("+mine.own=1", "TRL does not know this key"),
    ],
)
def test_a_key_that_trl_would_drop_is_refused(word: str, accepted: str) -> None:
    key, _, value = word.lstrip("+").partition("=")
    with pytest.raises(ValueError, match="is not accepted") as raised:
        on_trl.check_keys(composed(word))
    line = str(raised.value)
    assert line.startswith(f"{key}=")
    assert value.strip("[]").lower() in line.lower()
    assert accepted in line
    assert line.endswith("with trainer=trl")
    assert "\n" not in line


def test_trl_has_one_seed_and_both_keys_may_name_it() -> None:
    on_trl.check_read(composed(f"{ROLLOUT}.seed=7", "data.seed=7"))


@pytest.mark.parametrize(
    "key", [f"{ACTOR}.optim.min_lr_ratio", f"{ACTOR}.ppo_max_token_len_per_gpu", "critic.ppo_epochs"]
)
def test_a_number_that_verl_or_nobody_reads_may_be_null(key: str) -> None:
    on_trl.check_read(composed(f"{key}=null"))


def test_every_shipped_recipe_and_task_is_accepted() -> None:
    for recipe in names("recipe"):
        on_trl.check_read(composed(recipe=recipe))
    tasks = [task for task in names("task") if task != "calculator"]
    for word in ["device=cuda", *(f"task={task}" for task in tasks)]:
        on_trl.check_read(composed(word))
    with pytest.raises(ValueError, match=r"multi_turn\.enable=True is not accepted"):  # verl's tools are not TRL's
        on_trl.check_read(composed("task=calculator"))


def test_a_key_is_in_one_part_of_the_table_and_is_one_of_verls_or_ours() -> None:
    parts = [set(on_trl.READ), set(on_trl.NO_PART), set(on_trl.ACCEPTED) - {"trainer.resume_mode"}]
    assert sum(map(len, parts)) == len(set.union(*parts))
    configs = verl_defaults(), composed("task=reasoning_gym"), composed("device=cuda"), composed("task=ladder")
    known = {key for config in configs for key in on_trl.leaves(config)}
    assert [name for name in set.union(*parts) if not any(key.startswith(name) for key in known)] == []


# -- what is translated ------------------------------------------------------------------------------------------------

needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")


def arguments(*words: str) -> dict[str, Any]:
    return on_trl.arguments(composed(*words))


@needs_trl
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([f"{ACTOR}.entropy_coeff=0.01"], {"entropy_coef": 0.01}),
        ([f"{ACTOR}.clip_ratio_c=5"], {"delta": 5}),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], {"delta": None, "importance_sampling_level": "sequence"}),
        ([f"{ACTOR}.optim.clip_grad=0.3"], {"max_grad_norm": 0.3}),
        ([f"{ACTOR}.optim.betas=[0.8,0.9]"], {"adam_beta1": 0.8, "adam_beta2": 0.9}),
        (
            [f"{ACTOR}.optim.lr_warmup_steps=5", f"{ACTOR}.ppo_epochs=2"],  # a step of verl's is two updates
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10},
        ),
        (
            [f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=40"],
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4},
        ),
        (["trainer.test_freq=-1"], {"eval_on_start": True, "eval_strategy": "no"}),  # before training alone
        (["data.shuffle=false"], {"shuffle_dataset": False}),
        (["trainer.max_actor_ckpt_to_keep=2"], {"save_total_limit": 2}),
    ],
)
def test_a_key_of_verls_in_trls_words(words: list[str], said: dict[str, Any]) -> None:
    found = arguments(*words)
    assert {name: found[name] for name in said} == said
    plain = arguments()
    assert any(plain.get(name) != value for name, value in said.items())


@needs_trl
@pytest.mark.parametrize(
    ("prompts", "mini", "n", "micro", "rows_at_once"),
    [(25, 25, 4, 64, 50), (32, 32, 8, 64, 64), (32, 16, 8, None, 128), (7, 7, 1, 4, 1), (6, 3, 4, 5, 4)],
)
def test_every_row_of_a_mini_batch_is_trained_whatever_the_micro_batch(
    prompts: int, mini: int, n: int, micro: int | None, rows_at_once: int
) -> None:
    sizes = {"data.train_batch_size": prompts, f"{ACTOR}.ppo_mini_batch_size": mini, f"{ROLLOUT}.n": n}
    words = [f"{key}={value}" for key, value in sizes.items()]
    found = arguments(*words, f"{ACTOR}.ppo_micro_batch_size_per_gpu={'null' if micro is None else micro}")
    assert found["per_device_train_batch_size"] == rows_at_once
    assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == mini * n
    assert found["per_device_train_batch_size"] * found["steps_per_generation"] == prompts * n


@pytest.mark.parametrize("value", ["0", "x", "null"])
def test_a_mini_batch_divides_the_batch(value: str) -> None:
    with pytest.raises(ValueError, match=r"ppo_mini_batch_size=\S+ is not accepted: a divisor of 32"):
        on_trl.check_keys(composed(f"{ACTOR}.ppo_mini_batch_size={value}"))


def test_to_go_on_from_a_path_needs_one() -> None:
    with pytest.raises(ValueError, match="resume_from_path=None is not accepted: the folder of a checkpoint, with"):
        on_trl.check(composed("trainer.resume_mode=resume_path"))


def test_a_warm_up_by_a_share_of_a_run_of_unknown_length_is_refused() -> None:
    words = ["trainer.total_training_steps=null", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"]
    with pytest.raises(ValueError, match=r"lr_warmup_steps_ratio=0\.1 is not accepted: 0 without"):
        on_trl.check(composed(*words))


@needs_trl
@pytest.mark.parametrize("warm_up", [0, 3])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_learning_rate_goes_the_way_that_verls_goes(schedule: str, warm_up: int) -> None:
    from transformers import get_scheduler
    from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

    words = [f"{ACTOR}.optim.lr_scheduler_type={schedule}", f"{ACTOR}.optim.lr_warmup_steps={warm_up}"]
    said = arguments(*words, f"{ACTOR}.optim.min_lr_ratio=0.2", "trainer.total_training_steps=12")
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2)]
    theirs = get_scheduler(
        said["lr_scheduler_type"],
        optimizers[0],
        num_warmup_steps=said["warmup_steps"],
        num_training_steps=said["max_steps"],
        scheduler_specific_kwargs=said.get("lr_scheduler_kwargs"),
    )
    verls = (
        get_constant_schedule_with_warmup(optimizers[1], warm_up)
        if schedule == "constant"
        else get_cosine_schedule_with_warmup(optimizers[1], warm_up, 12, min_lr_ratio=0.2)
    )
    for _ in range(12):
        assert theirs.get_last_lr() == pytest.approx(verls.get_last_lr())
        for optimizer, one in zip(optimizers, (theirs, verls), strict=True):
            optimizer.step()
            one.step()


@pytest.mark.parametrize(
    ("metric", "enable", "judged"),
    [("acc", True, "acc"), ("seq_reward", True, "acc"), ("format", True, "format"), ("format", False, "acc")],
)
def test_groups_are_judged_by_the_value_that_the_filter_names(metric: str, enable: bool, judged: str) -> None:
    config = composed(f"algorithm.filter_groups.metric={metric}", f"algorithm.filter_groups.enable={enable}")
    assert on_trl.graded(config) == ["score", judged]


@pytest.mark.parametrize("mode", ["auto", "disable", "resume_path"])
def test_where_a_run_goes_on_from(mode: str, tmp_path: Any) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    place = {"default_local_dir": str(tmp_path), "resume_from_path": "/elsewhere/checkpoint-9"}
    found = {"auto": tmp_path / "checkpoint-3", "disable": None}.get(mode, on_trl.Path("/elsewhere/checkpoint-9"))
    assert on_trl._checkpoint(OmegaConf.create({"trainer": {"resume_mode": mode, **place}})) == found


def test_a_run_without_a_seed_draws_the_same_rows_after_each_start(tmp_path: Path) -> None:
    columns = {"prompt": [f"{one}+{one}=" for one in range(100)], "data_source": ["sums"] * 100}
    pq.write_table(pa.table({**columns, "reward_model": [{"ground_truth": "2"}] * 100}), tmp_path / "rows.parquet")
    words = [f"data.train_files={tmp_path}/rows.parquet", "data.train_max_samples=10", "data.seed=null"]
    first, again = (dataset(composed(*words), "train")["prompt"][:] for _ in range(2))
    assert first == again
    assert len(set(first)) == 10
    assert first != dataset(composed(*words[:2], "data.seed=2"), "train")["prompt"][:]


def test_an_adapter_is_the_one_that_verl_would_train() -> None:
    assert on_trl.adapter(composed()) is None
    layers = f"{MODEL}.target_modules=[q_proj,v_proj]"
    config = composed(f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=32", layers, f"{MODEL}.lora.merge=true")
    on_trl.check_read(config)
    found = on_trl.adapter(config)
    assert (found.r, found.lora_alpha, found.target_modules) == (8, 32, {"q_proj", "v_proj"})
    assert on_trl.adapter(composed(f"{MODEL}.lora_rank=4")).target_modules == "all-linear"
