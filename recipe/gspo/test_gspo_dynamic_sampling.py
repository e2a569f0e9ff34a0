"""What this recipe decides, without Ray, a model or a GPU: ``pytest recipe/gspo``. The training itself is checked by
``validate_implementation.py``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import validate_implementation
from omegaconf import DictConfig

from goldilocks.config.recipes import choose, compose_config
from goldilocks.config.settings import Settings
from goldilocks.core import Collector, Exhausted, ListSource
from goldilocks.types import Rollout

HERE = Path(__file__).parent
CONFIG = str(HERE / "config" / "gspo_dynamic_sampling.yaml")


@pytest.fixture(scope="module")
def published() -> DictConfig:
    return compose_config(choose([CONFIG, "task=gsm8k_3b"], "cuda"))


def collector(config: DictConfig, *kinds: str) -> Collector:
    """The collector that the config describes, over prompts that are "right", "wrong" or "mixed" in turn."""
    contents = [(index, kinds[index % len(kinds)]) for index in range(6000)]
    return Settings.from_config(config).collector(ListSource(contents))


def run(built: Collector) -> None:
    """Answer everything until a batch is there."""
    while not built.ready:
        for request in built.requests():
            kind = request.prompt.payload[1]
            for index in range(request.first, request.first + request.n):
                reward = {"right": 1.0, "wrong": 0.0, "mixed": float(index % 2)}[kind]
                built.observe(Rollout(request.uid, index, reward=reward, tokens=100))


def test_only_groups_with_variance_are_trained_and_the_batch_is_full(published: DictConfig) -> None:
    built = collector(published, "right", "wrong", "mixed")
    run(built)
    batch = built.take()
    assert len(batch) == 512
    assert all(len(group) == 16 and len(set(group.rewards)) == 2 for group in batch)
    metrics = built.metrics()
    assert 0.3 < metrics["train/filtered_prompts_ratio"] < 0.4
    assert 1 < metrics["train/num_gen_batches"] <= 5


def test_data_without_variance_ends_the_step_after_five_generation_batches(published: DictConfig) -> None:
    built = collector(published, "right", "wrong")
    with pytest.raises(Exhausted, match=r"num_gen_batches=5 >= max_num_gen_batches=5\. Generated too many batches"):
        run(built)
    assert built.prompts_issued == 5 * 512


def test_without_dynamic_sampling_every_group_is_trained(published: DictConfig) -> None:
    plain = published.copy()
    plain.algorithm.filter_groups.enable = False
    built = collector(plain, "right", "wrong")
    run(built)
    assert len(built.take()) == built.prompts_issued == 512


def test_the_tiny_form_has_the_same_algorithm(published: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOLDILOCKS_TASK", "nowhere")
    tiny = compose_config(choose([CONFIG, "task=arithmetic"], "cuda"))
    assert tiny.algorithm == published.algorithm
    for key in ("policy_loss", "clip_ratio_low", "clip_ratio_high", "loss_agg_mode", "use_kl_loss", "entropy_coeff"):
        assert tiny.actor_rollout_ref.actor[key] == published.actor_rollout_ref.actor[key]
    assert tiny.actor_rollout_ref.rollout.n == published.actor_rollout_ref.rollout.n == 16


@pytest.mark.parametrize("page", ["README_dynamic_sampling.md", "README_dynamic_sampling.zh.md"])
def test_the_pages_show_what_the_validation_prints(page: str) -> None:
    """``…`` in a page stands for anything; the figures of the last line, for which it trains, are those of one run."""
    shown = (HERE / page).read_text(encoding="utf-8").splitlines()
    for check in (validate_implementation.files, validate_implementation.config, validate_implementation.collector):
        assert f"ok      {check.__name__}: {check()}" in shown
    names = ("accounts/generated_rollouts", "accounts/filtered_rollouts", "actor/seq_importance_ratio")
    figures = dict(zip(names, (480.0, 304.0, 0.9808), strict=True))
    printed = f"ok      training: {validate_implementation.summary(128, figures)}"
    last = next(line for line in shown if line.startswith("ok      training: "))
    assert re.fullmatch(re.escape(last).replace("…", ".*"), printed)


def test_the_loss_clips_whole_sequences_at_the_published_range(published: DictConfig) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    actor = published.actor_rollout_ref.actor.copy()
    actor.ppo_micro_batch_size_per_gpu = 1
    loss = get_policy_loss_fn(actor.policy_loss.loss_mode)
    old = torch.zeros(3, 4)
    # Tokens move apart and cancel in the first row; the others move as a whole, up and down.
    new = torch.tensor([[0.1, -0.1, 0.1, -0.1], [6e-4] * 4, [-6e-4] * 4])
    advantages = torch.tensor([[1.0], [1.0], [-1.0]]).expand(3, 4)
    _, metrics = loss(old, new, advantages, torch.ones(3, 4), actor.loss_agg_mode, omega_conf_to_dataclass(actor))
    assert metrics["actor/pg_clipfrac_upper"] == pytest.approx(1 / 3)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 3)
