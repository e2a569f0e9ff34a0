"""Gradients of the micro-batches that the collection and ``only_signal`` make: numbers, and TRL's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import trl_world as world
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from goldilocks.trl.rows import LOG_PROBS, Row, join_rows

LOSSES = ["grpo", "dapo", "dr_grpo", "sapo"]


@cache
def trainer(loss: str, bf16: bool, only_signal: bool) -> Any:
    out = Path(mkdtemp())
    made: Any = world.trainer(out, sections={"only_signal": only_signal}, loss_type=loss, bf16=bf16)
    made.current_gradient_accumulation_steps = 1  # as the training loop sets it
    made.model.train()
    return made


def gradient(of: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the gradient of a micro-batch, after a look at the loss."""
    of.model.zero_grad()
    loss = of.compute_loss(of.model, {name: value.clone() for name, value in inputs.items()})
    assert loss.isfinite()
    loss.backward()
    return torch.cat([one.grad.flatten() for one in of.model.parameters()])


@st.composite
def rows(draw: st.DrawFn) -> tuple[Row, float]:
    """A rollout and its advantage: short or long, truncated, silent, of now or of a policy far away."""
    prompt, completion = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    ids = draw(st.lists(st.integers(0, 15), min_size=prompt + completion, max_size=prompt + completion))
    row = Row(
        {
            "prompt_ids": torch.tensor(ids[:prompt]),
            "prompt_mask": torch.ones(prompt, dtype=torch.long),
            "completion_ids": torch.tensor(ids[prompt:]),
            "completion_mask": torch.ones(completion, dtype=torch.long),
        },
        (0.0,),
        None,
        None,
    )
    if draw(st.booleans()):
        row = row.silent()
    old = draw(st.sampled_from([None, -25.0, -3.0, 0.0]))
    row = row.with_own_log_probs() if old is None else row.with_log_probs(torch.full((completion,), old))
    return row, draw(st.sampled_from([0.0, 0.0, 1.5, -2.5]))


def micro_batch(drawn: list[tuple[Row, float]], replays: bool) -> dict[str, Any]:
    columns = join_rows([row for row, _ in drawn], pad_token=0, multiple=None)
    if not replays:
        del columns[LOG_PROBS]
    tokens = columns["completion_mask"].sum().clamp(min=1)  # a batch has some, though of this part all may be silent
    return {
        **columns,
        "advantages": torch.tensor([advantage for _, advantage in drawn]),
        "num_items_in_batch": tokens,
    }


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@settings(max_examples=12, deadline=None)
@given(loss=st.sampled_from(LOSSES), drawn=st.lists(rows(), min_size=1, max_size=6), replays=st.booleans())
def test_a_finite_loss_has_a_finite_gradient_and_rows_without_signal_have_no_part_in_it(
    bf16: bool, loss: str, drawn: list[tuple[Row, float]], replays: bool
) -> None:
    inputs = micro_batch(drawn, replays)
    whole, part = (gradient(trainer(loss, bf16, only_signal), inputs) for only_signal in (False, True))
    assert whole.isfinite().all()
    assert part.isfinite().all()
    largest = max(1e-6, float(whole.abs().max()))
    assert torch.allclose(part / largest, whole / largest, atol=0.1 if bf16 else 1e-4)
