"""The guards of an update on TRL.

The guard of the loss is computed by hand for a micro-batch of three rows. Of the guard for old weights: which log-probs
are compared, and when a gap is judged.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl_world as world
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen3MoeConfig, Qwen3VLMoeConfig

from goldilocks.core.replay import Guard
from goldilocks.trl.callbacks import check_guard, is_comparable, is_exact, trainers_log_probs
from goldilocks.trl.rows import LOG_PROBS

MOVED = torch.tensor([[0.1, 0.15, 0.2], [-0.1, -0.15, 0.9], [0.0, -0.7, 0.0]])  # log π − log π that wrote the token
ADVANTAGES = torch.tensor([1.0, -2.0, 0.5])
MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
# Pushed further: 0.1² 0.15² 0.2² of the first row, 0.1² 0.15² of the second. The mean of all five is 0.021, that of the
# four smallest 0.01625: with a bound of 0.02 the third token of the first row is masked, with 0.012 two more are.
KEPT = {
    1.0: torch.ones(3, 3),
    0.02: torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 1, 1]]),
    0.012: torch.tensor([[1.0, 0, 0], [1, 0, 1], [1, 1, 1]]),
}
LONGEST = 6  # max_completion_length of the small world
LOSSES = {
    "grpo": lambda terms: ((terms * MASK).sum(1) / MASK.sum(1)).mean(),
    "dapo": lambda terms: (terms * MASK).sum() / MASK.sum(),
    "dr_grpo": lambda terms: (terms * MASK).sum() / (3 * LONGEST),
}


def made(out: Path, loss: str, bound: float) -> Any:
    guard = {"enable": True, "bound": bound, "skip": None}
    trainer: Any = world.trainer(out, sections={"goldilocks": {"guard": guard}}, loss_type=loss)
    trainer.current_gradient_accumulation_steps = 1  # as the training loop sets it
    trainer.model.train()
    return trainer


def micro_batch(trainer: Any) -> dict[str, Tensor]:
    prompts, completions = torch.tensor([[2, 3, 4]] * 3), torch.tensor([[5, 6, 7], [8, 9, 10], [5, 7, 0]])
    with torch.no_grad():
        logits = trainer.model(torch.cat([prompts, completions], 1)).logits[:, 2:-1]
    now = logits.log_softmax(-1).gather(2, completions[..., None])[..., 0]
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": MASK,
        "advantages": ADVANTAGES,
        "num_items_in_batch": MASK.sum(),
        LOG_PROBS: now - MOVED,
    }


@pytest.mark.parametrize("bound", KEPT)
@pytest.mark.parametrize("loss", LOSSES)
def test_masked_tokens_have_no_part_in_the_loss_and_stay_in_its_denominator(
    tmp_path: Path, loss: str, bound: float
) -> None:
    trainer = made(tmp_path, loss, bound)
    inputs = micro_batch(trainer)
    found = trainer.compute_loss(trainer.model, inputs)
    ratio = MOVED.exp()
    advantages = ADVANTAGES[:, None] * KEPT[bound]
    terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    assert found.item() == pytest.approx(float(LOSSES[loss](terms)), abs=1e-5)
    assert torch.equal(inputs["advantages"], ADVANTAGES), "the next update of this batch has a guard of its own"


def test_an_evaluation_is_not_guarded(tmp_path: Path) -> None:
    trainer = made(tmp_path, "grpo", 0.012)
    inputs = micro_batch(trainer)
    trainer.model.eval()
    whole = trainer.compute_loss(trainer.model, inputs)
    trainer.model.train()
    assert whole.item() != pytest.approx(trainer.compute_loss(trainer.model, inputs).item(), abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"args": SimpleNamespace(loss_type="vespo")}, "False with loss_type='vespo'"),
        ({"use_liger_kernel": True}, "False with use_liger_kernel"),
        ({"is_deepspeed_enabled": True}, "False with DeepSpeed"),
    ],
)
def test_what_the_guard_cannot_hold_in_is_refused(changes: dict[str, Any], message: str) -> None:
    usual = {"args": SimpleNamespace(loss_type="grpo"), "use_liger_kernel": False, "is_deepspeed_enabled": False}
    with pytest.raises(ValueError, match=f"goldilocks.guard.enable=True is not accepted: {message}"):
        check_guard(SimpleNamespace(**{**usual, **changes}), Guard(enable=True))


NAN = torch.nan
NOW = torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0]])
SAMPLES = torch.tensor([[-1.5, -2.0], [-4.0, -4.0], [-1.5, 0.0]])
WRITTEN = torch.tensor([[1, 1], [1, 1], [1, 0]])


def args(**chosen: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"bf16": False, "fp16": False, "top_p": 1.0, "top_k": 0, **chosen})


def test_a_batch_of_one_update_is_compared_with_the_log_probs_of_now() -> None:
    own, fresh = trainers_log_probs({"completion_mask": WRITTEN}, NOW, SAMPLES)
    assert own is NOW
    assert fresh.tolist() == WRITTEN.bool().tolist()


def test_rows_that_carry_the_engines_own_log_probs_are_left_out() -> None:
    """The second row was carried, the third has those that TRL computed before the first update of its batch."""
    old = torch.tensor([[NAN, NAN], [-4.0, -4.0], [-1.25, 0.0]])
    own, fresh = trainers_log_probs({"completion_mask": WRITTEN, LOG_PROBS: old}, NOW, SAMPLES)
    assert own.tolist() == [[-1.0, -2.0], [-4.0, -4.0], [-1.25, 0.0]]
    assert fresh.tolist() == [[True, True], [False, False], [True, False]]


def test_tokens_of_tools_are_left_out() -> None:
    inputs = {"completion_mask": WRITTEN, "tool_mask": torch.tensor([[1, 0], [1, 1], [1, 1]])}
    assert trainers_log_probs(inputs, NOW, SAMPLES)[1].sum() == 4


def test_dropout_and_cut_distributions_explain_a_gap() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))
    assert is_comparable(args(), plain)
    assert not is_comparable(args(), nn.Sequential(nn.Dropout(0.1)))
    for cut in ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}):
        assert not is_comparable(args(**cut), plain)


@pytest.mark.parametrize(
    "other",
    [
        {"repetition_penalty": 1.1},
        {"generation_kwargs": {"logit_bias": {"5": 1.0}}},
        {"vllm_structured_outputs_regex": "[0-9]+"},
        {"vllm_mode": "server", "temperature": 0.7},
    ],
    ids=str,
)
def test_log_probs_of_vllm_that_are_not_the_trainers_are_not_judged(other: dict[str, Any]) -> None:
    plain = nn.Linear(2, 2)
    defaults = {"use_vllm": True, "vllm_mode": "colocate", "vllm_structured_outputs_regex": None, "temperature": 0.7}
    assert is_comparable(args(**defaults, repetition_penalty=1.0, generation_kwargs=None), plain)
    assert is_comparable(args(**{**defaults, "vllm_mode": "server", "temperature": 1.0}), plain)
    assert not is_comparable(args(**{**defaults, **other}), plain)


def test_experts_that_engine_and_trainer_choose_differently_explain_a_gap() -> None:
    model = nn.Linear(2, 2)
    for config, judged in ((Qwen2Config(), True), (Qwen3MoeConfig(), False), (Qwen3VLMoeConfig(), False)):
        model.config = config
        assert is_comparable(args(), model) == judged


def test_only_fp32_on_both_sides_is_exact() -> None:
    assert is_exact(args(), nn.Linear(2, 2))
    assert not is_exact(args(), nn.Linear(2, 2).to(torch.bfloat16))
    for half in ("bf16", "fp16", "use_vllm"):
        assert not is_exact(args(**{half: True}), nn.Linear(2, 2))


def test_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"goldilocks\.on_stale_weights='stop' is not accepted: one of warn, error"):
        world.trainer(tmp_path, sections={"goldilocks": {"on_stale_weights": "stop"}, "engine_slots": 8})
