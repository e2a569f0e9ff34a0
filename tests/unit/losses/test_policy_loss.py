"""What is said about a config before a run begins."""

from __future__ import annotations

import inspect
import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from goldilocks.config.recipes import read_recipe
from goldilocks.losses.log_probs import behaviour_log_probs
from goldilocks.losses.policy_loss import check_algorithm, check_older_rows, clipping_metrics, sequence_ratio
from goldilocks.verl import plugin
from goldilocks.verl.checks import check_run


def config(loss_mode: str = "gspo", algorithm: Any = None, goldilocks: Any = None, **actor: Any) -> Any:
    """verl's defaults of what is looked at, with GSPO's range and aggregation."""
    defaults = {
        "policy_loss": {"loss_mode": loss_mode},
        "clip_ratio": 0.2,
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "loss_agg_mode": "seq-mean-token-mean",
        "use_kl_loss": False,
        "entropy_coeff": 0,
        "ppo_mini_batch_size": 8,
    }
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {**defaults, **actor}, "rollout": {"name": "vllm"}},
            "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, **(algorithm or {})},
            "data": {"train_batch_size": 8},
            "goldilocks": goldilocks,
        }
    )


def test_a_sound_config_gives_no_warning() -> None:
    assert check_algorithm(config()) == []
    plain = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "loss_agg_mode": "token-mean"}
    assert check_algorithm(config("vanilla", **plain)) == []
    assert check_algorithm(config("cispo", clip_ratio_low=10, clip_ratio_high=0.2)) == []  # without a lower bound


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo"])
def test_a_lower_range_above_the_upper_is_an_error_naming_both(loss_mode: str) -> None:
    with pytest.raises(ValueError, match=r"actor\.clip_ratio_low=0\.2 is not accepted: at most clip_ratio_high=0\.0"):
        check_algorithm(config(loss_mode, clip_ratio_low=0.2))


def test_a_null_range_is_clip_ratio() -> None:
    with pytest.raises(ValueError, match=r"clip_ratio_low=0\.2 is not accepted: at most clip_ratio_high=0\.1"):
        check_algorithm(config("vanilla", clip_ratio_low=None, clip_ratio_high=0.1))


def test_gspo_with_a_token_level_range_or_over_tokens_is_warned_of() -> None:
    (warning,) = check_algorithm(config(clip_ratio_low=0.2, clip_ratio_high=0.2))
    assert "clip_ratio_low=0.2, clip_ratio_high=0.2" in warning
    assert "0.0003 and 0.0004" in warning
    assert check_algorithm(config(clip_ratio_high=0.01)) != []
    assert check_algorithm(config(clip_ratio_high=0.0099)) == []
    (warning,) = check_algorithm(config(loss_agg_mode="token-mean"))
    assert "loss_agg_mode=token-mean" in warning
    assert "seq-mean-token-mean" in warning


def test_the_rounding_of_an_engine_is_wider_than_gspos_range() -> None:
    """A policy that has not moved: carried rows have the engine's log-probs, and a third lose their gradient."""
    noise = torch.randn(1000, 300, generator=torch.Generator().manual_seed(0))
    now, mask = torch.full((1000, 300), -1.0), torch.ones(1000, 300)
    rows = {"response_mask": mask, "rollout_log_probs": now + 0.02 * noise, "old_log_probs": now}
    carried, _ = behaviour_log_probs(rows, torch.ones(1000, dtype=torch.bool), None)
    ratio = sequence_ratio(carried, now, mask)
    for clipped in (ratio < 1 - 3e-4, ratio > 1 + 4e-4):
        assert 0.3 < clipped.float().mean() < 0.45
    fresh, _ = behaviour_log_probs(rows, torch.zeros(1000, dtype=torch.bool), None)
    assert sequence_ratio(fresh, now, mask).eq(1).all()


def test_gspo_with_rows_of_an_older_policy_is_refused_unless_they_are_corrected() -> None:
    with pytest.raises(ValueError, match=r"filter_groups\.max_carry_steps=1 is not accepted: 0, .*loss_mode=gspo"):
        check_older_rows(config(), 1)
    check_older_rows(config(algorithm={"rollout_correction": {"rollout_is": "sequence"}}), 1)
    check_older_rows(config(clip_ratio_low=0.2, clip_ratio_high=0.2), 1)
    check_older_rows(config("vanilla", clip_ratio_low=0.2, clip_ratio_high=0.28), 1)
    assert read_recipe("gspo")["algorithm"]["filter_groups"]["max_carry_steps"] == 0


def test_a_pool_of_penalised_rewards_is_an_error() -> None:
    pool = {"adv_estimator": "grpo_pool"}
    assert check_algorithm(config(algorithm=pool)) == []
    with pytest.raises(ValueError, match=r"algorithm\.use_kl_in_reward=True .*adv_estimator=grpo_pool"):
        check_algorithm(config(algorithm={**pool, "use_kl_in_reward": True}))


def test_a_run_is_told_of_a_likely_mistake_once_and_of_an_error_at_all(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="clip_ratio_low"):
        check_run(config(clip_ratio_low=0.2))
    with caplog.at_level(logging.WARNING):
        check_run(config(clip_ratio_low=0.2, clip_ratio_high=0.2))
    assert caplog.text.count("a token-level range") == 1


plugin.register()

LOW, HIGH = 3e-4, 4e-4
SHARES = ("actor/pg_clipfrac_lower", "actor/pg_clipfrac_upper")
SPREAD = tuple(f"actor/seq_importance_ratio{quantile}" for quantile in ("", "_p05", "_p50", "_p95"))


def actor(low: float | None = LOW, high: float | None = HIGH, **more: Any) -> ActorConfig:
    clip = {"clip_ratio": 0.2, "clip_ratio_low": low, "clip_ratio_high": high}
    return ActorConfig(strategy="fsdp2", rollout_n=4, use_dynamic_bsz=True, **clip, **more)


def batch(seed: int, rows: int = 12, width: int = 9, step: float = 1e-3) -> dict[str, Tensor]:
    """Rows of different length around the clipping range, the last one padding."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=random)
    lengths[-1] = 0
    old = -torch.rand(rows, width, generator=random) - 0.1
    return {
        "old_log_prob": old,
        "log_prob": old + step * torch.randn(rows, width, generator=random),
        "advantages": torch.randn(rows, 1, generator=random).expand(rows, width).contiguous(),
        "response_mask": torch.arange(width) < lengths.unsqueeze(-1),
    }


def call(rows: dict[str, Tensor], config: ActorConfig, **more: Any) -> tuple[Tensor, dict[str, float]]:
    loss: tuple[Tensor, dict[str, float]] = core_algos.get_policy_loss_fn("gspo")(
        **rows, loss_agg_mode="seq-mean-token-mean", config=config, **more
    )
    return loss


def with_gradient(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**rows, "log_prob": rows["log_prob"].clone().requires_grad_()}


def test_the_name_gspo_and_the_function_are_the_measured_loss() -> None:
    assert core_algos.get_policy_loss_fn("gspo") is core_algos.compute_policy_loss_gspo
    assert core_algos.compute_policy_loss_gspo.__module__ == "verl.trainer.ppo.core_algos"  # it still says what it is
    assert core_algos.compute_policy_loss_gspo.__wrapped__ is inspect.unwrap(core_algos.compute_policy_loss_gspo)


@settings(max_examples=15)
@given(st.integers(0, 2**31), st.booleans())
def test_verls_numbers_stay_to_the_bit(seed: int, weighted: bool) -> None:
    weights = {"rollout_is_weights": torch.rand(12, 9)} if weighted else {}
    mine, verls = with_gradient(batch(seed)), with_gradient(batch(seed))
    loss, metrics = call(mine, actor(), **weights)
    original = inspect.unwrap(core_algos.compute_policy_loss_gspo)
    expected, before = original(**verls, loss_agg_mode="seq-mean-token-mean", config=actor(), **weights)
    assert loss.item() == expected.item()
    assert torch.equal(
        torch.autograd.grad(loss, mine["log_prob"])[0], torch.autograd.grad(expected, verls["log_prob"])[0]
    )
    assert {name: metrics[name] for name in before if name != SHARES[0]} == {
        name: value for name, value in before.items() if name != SHARES[0]
    }
    assert before[SHARES[0]] == 0.0  # the constant that is replaced
    assert set(metrics) - set(before) == {SHARES[1], *SPREAD}


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.floats(1e-4, 1e-2))
def test_lower_and_upper_share_sum_to_verls_share(seed: int, step: float) -> None:
    _, metrics = call(batch(seed, step=step), actor())
    assert sum(metrics[name] for name in SHARES) == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)


def test_each_share_counts_the_tokens_on_its_side_that_the_clip_silences() -> None:
    ratio = torch.tensor([0.9, 0.9, 1.1, 1.1, 1.0, 0.5])
    advantages = torch.tensor([-1.0, 1.0, 1.0, -1.0, -1.0, -1.0]).unsqueeze(-1).expand(6, 4)
    mask = torch.arange(4) < torch.tensor([3, 1, 2, 1, 1, 0]).unsqueeze(-1)
    metrics = clipping_metrics(ratio, advantages, mask, LOW, HIGH)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(3 / 8)  # the first row; the last one is padding
    assert metrics["actor/pg_clipfrac_upper"] == pytest.approx(2 / 8)  # the third


def test_the_ratio_is_spread_over_sequences_and_padding_is_none() -> None:
    rows = batch(3, rows=41, step=1e-1)
    _, metrics = call(rows, actor())
    mask = rows["response_mask"]
    k = torch.stack([(rows["log_prob"] - rows["old_log_prob"])[row][mask[row]].mean() for row in range(40)])
    assert not mask[40].any()
    quantiles = k.exp().quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    assert [metrics[name] for name in SPREAD] == pytest.approx([k.exp().mean().item(), *quantiles], rel=1e-5)


def test_a_ratio_is_clamped_where_the_loss_clamps_it() -> None:
    old = torch.full((1, 3), -90.0)
    assert sequence_ratio(old, old + 50, torch.ones(1, 3)).item() == pytest.approx(math.exp(10))


def test_a_micro_batch_of_padding_reports_an_unmoved_policy_and_a_broken_log_prob_is_not_hidden() -> None:
    rows, broken = batch(0), batch(0)
    broken["log_prob"][2, 0] = torch.nan
    assert math.isnan(call(broken, actor())[1]["actor/seq_importance_ratio"])
    rows["response_mask"] = torch.zeros_like(rows["response_mask"])
    _, metrics = call({**rows}, actor())
    assert [metrics[name] for name in SHARES] == [0, 0]
    assert [metrics[name] for name in SPREAD] == [1, 1, 1, 1]


def test_a_null_range_falls_back_to_clip_ratio_as_verls_loss_does() -> None:
    _, metrics = call(batch(1, step=0.5), actor(None, None))
    _, explicit = call(batch(1, step=0.5), actor(0.2, 0.2))
    assert metrics == explicit
    assert metrics["actor/pg_clipfrac"] > 0
