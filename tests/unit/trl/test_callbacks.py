"""What is compared by the guard for old weights on TRL, when a budget is validated, and what TRL's checkpoint lacks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import trl_world as world
from builders import plain_collector
from torch import nn
from transformers import Qwen2Config, Qwen3MoeConfig, Qwen3VLMoeConfig

from goldilocks.core import Accounts
from goldilocks.core.limits import Budget
from goldilocks.drive.backend import Rounds
from goldilocks.drive.driver import Driver, Meter
from goldilocks.trl.collection import Collection, Processes
from goldilocks.trl.on_disk import BudgetCallback, Saved, is_comparable, is_exact, trainers_log_probs
from goldilocks.trl.rows import LOG_PROBS, CompletionRows

NAN = torch.nan
NOW = torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0]])
SAMPLES = torch.tensor([[-1.5, -2.0], [-4.0, -4.0], [-1.5, 0.0]])
WRITTEN = torch.tensor([[1, 1], [1, 1], [1, 0]])


def args(**chosen: Any) -> SimpleNamespace:
    usual = {"bf16": False, "fp16": False, "use_vllm": False, "vllm_structured_outputs_regex": None}
    usual |= {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None}
    return SimpleNamespace(**{**usual, **chosen})


def test_a_batch_of_one_update_is_compared_with_the_log_probs_of_now_but_for_tokens_of_tools() -> None:
    own, fresh = trainers_log_probs({"completion_mask": WRITTEN}, NOW, SAMPLES)
    assert own is NOW
    assert fresh.tolist() == WRITTEN.bool().tolist()
    inputs = {"completion_mask": WRITTEN, "tool_mask": torch.tensor([[1, 0], [1, 1], [1, 1]])}
    assert trainers_log_probs(inputs, NOW, SAMPLES)[1].sum() == 4


def test_rows_that_carry_the_engines_own_log_probs_are_left_out() -> None:
    """The second row was carried, the third has those that TRL computed before the first update of its batch."""
    old = torch.tensor([[NAN, NAN], [-4.0, -4.0], [-1.25, 0.0]])
    own, fresh = trainers_log_probs({"completion_mask": WRITTEN, LOG_PROBS: old}, NOW, SAMPLES)
    assert own.tolist() == [[-1.0, -2.0], [-4.0, -4.0], [-1.25, 0.0]]
    assert fresh.tolist() == [[True, True], [False, False], [True, False]]


def test_a_run_that_goes_on_with_a_smaller_budget_is_validated_at_its_next_update() -> None:
    accounts, processes = Accounts(), Processes(SimpleNamespace(num_processes=1, process_index=0))
    accounts.generated_rollouts = 60
    budget = Budget(rollouts=100, validations=2)
    callback = BudgetCallback(budget, Meter(budget, accounts), processes)
    state, control = SimpleNamespace(global_step=3, max_steps=9), SimpleNamespace(should_training_stop=False)
    callback.on_train_begin(None, state, control)  # type: ignore[arg-type]
    callback.on_step_begin(None, state, control)  # type: ignore[arg-type]
    assert callback.on_step_end(None, state, control).should_evaluate  # type: ignore[arg-type]


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
    defaults = {"use_vllm": True, "vllm_mode": "colocate", "temperature": 0.7}
    assert is_comparable(args(**defaults), plain)
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


# -- checkpoints -------------------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def saved(processes: int) -> Saved:
    """Return the first process's of so many; what it decides reaches nobody."""
    rows, nothing, alone, several = CompletionRows(), cast("Any", None), first_of(1), first_of(processes)
    collection = Collection(nothing, rows, alone, nothing, keeps=True, seed=1)
    collection.driver = Driver(plain_collector(), Rounds(lambda _: ()), rows)
    return Saved(collection, several)


def first_of(processes: int) -> Processes:
    return Processes(SimpleNamespace(num_processes=processes, process_index=0))


def test_a_batch_that_is_only_partly_trained_goes_on(tmp_path: Path) -> None:
    saved(1).write(tmp_path, 3, [{"advantages": torch.ones(2)}])
    step, batch = saved(1).read(tmp_path, CPU)
    assert step == 3
    assert batch is not None
    assert torch.equal(batch[0]["advantages"], torch.ones(2))


def test_with_another_number_of_processes_a_new_batch_is_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process has its own part of the batch only: half of it would be trained as if it were all."""
    saved(2).write(tmp_path, 3, [{"advantages": torch.ones(2)}])
    assert saved(1).read(tmp_path, CPU) == (0, None)
    assert "written by 2 processes, and this run has 1" in caplog.text


def test_between_batches_the_number_of_processes_may_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(2).write(tmp_path, 4, None)
    assert saved(1).read(tmp_path, CPU) == (4, None)
    assert not caplog.text
