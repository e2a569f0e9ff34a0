"""What is said about a config before a run begins."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from omegaconf import OmegaConf

from goldilocks.losses import check_algorithm
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
    assert (
        check_algorithm(config("vanilla", clip_ratio_low=0.2, clip_ratio_high=0.28, loss_agg_mode="token-mean")) == []
    )
    assert check_algorithm(config(goldilocks={"loss_agg": "prompt-mean"})) == []


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo"])
def test_a_lower_range_above_the_upper_is_an_error_naming_both(loss_mode: str) -> None:
    with pytest.raises(ValueError, match=r"actor\.clip_ratio_low=0\.2 is not accepted: at most clip_ratio_high=0\.0"):
        check_algorithm(config(loss_mode, clip_ratio_low=0.2))


def test_a_null_range_is_clip_ratio() -> None:
    with pytest.raises(ValueError, match=r"clip_ratio_low=0\.2 is not accepted: at most clip_ratio_high=0\.1"):
        check_algorithm(config("vanilla", clip_ratio_low=None, clip_ratio_high=0.1))


def test_cispo_may_have_no_lower_bound() -> None:
    assert check_algorithm(config("cispo", clip_ratio_low=10, clip_ratio_high=0.2)) == []


def test_gspo_with_a_token_level_range_is_warned_of() -> None:
    (warning,) = check_algorithm(config(clip_ratio_low=0.2, clip_ratio_high=0.2))
    assert "clip_ratio_low=0.2, clip_ratio_high=0.2" in warning
    assert "0.0003 and 0.0004" in warning
    assert check_algorithm(config(clip_ratio_high=0.01)) != []
    assert check_algorithm(config(clip_ratio_high=0.0099)) == []


def test_gspo_over_tokens_is_warned_of() -> None:
    (warning,) = check_algorithm(config(loss_agg_mode="token-mean"))
    assert "loss_agg_mode=token-mean" in warning
    assert "seq-mean-token-mean" in warning


def test_a_pool_of_penalised_rewards_is_an_error() -> None:
    pool = {"adv_estimator": "grpo_pool"}
    assert check_algorithm(config(algorithm=pool)) == []
    with pytest.raises(ValueError, match=r"algorithm\.use_kl_in_reward=True .*adv_estimator=grpo_pool"):
        check_algorithm(config(algorithm={**pool, "use_kl_in_reward": True}))


@pytest.mark.parametrize(
    ("loss_mode", "how", "agg_mode", "named"),
    [
        ("gspo", "group-mean", "token-mean", r"goldilocks\.loss_agg='group-mean' is not accepted: prompt-mean"),
        ("kl_cov", "prompt-mean", "token-mean", r"loss_mode='kl_cov' is not accepted: .*vanilla, gspo"),
        ("vanilla", "prompt-mean", "token-sum", r"loss_agg_mode='token-sum' is not accepted: .* seq-mean-token-mean"),
    ],
)
def test_prompt_mean_where_it_cannot_be_exact_is_an_error(loss_mode: str, how: str, agg_mode: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_algorithm(config(loss_mode, goldilocks={"loss_agg": how}, loss_agg_mode=agg_mode))


def test_prompt_mean_says_which_terms_it_does_not_weigh() -> None:
    weighed = {"loss_agg": "prompt-mean"}
    kl, entropy = check_algorithm(config(goldilocks=weighed, use_kl_loss=True, entropy_coeff=0.01))
    assert "use_kl_loss=True" in kl
    assert "entropy_coeff=0.01" in entropy
    (tokens,) = check_algorithm(
        config("vanilla", goldilocks=weighed, loss_agg_mode="token-mean", ppo_mini_batch_size=4)
    )
    assert "several mini-batches" in tokens


def test_a_run_is_told_of_a_likely_mistake_once_and_of_an_error_at_all(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="clip_ratio_low"):
        check_run(config(clip_ratio_low=0.2))
    with caplog.at_level(logging.WARNING):
        check_run(config(clip_ratio_low=0.2, clip_ratio_high=0.2))
    assert caplog.text.count("a token-level range") == 1
