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
from transformers import MixtralConfig, MixtralForCausalLM

from goldilocks.tasks.tiny_model import character_tokenizer
from goldilocks.trl.collection import SCALE
from goldilocks.trl.rows import LOG_PROBS, CompletionRow, join_rows, signal_first

LOSSES = ["grpo", "dapo", "dr_grpo", "sapo"]
BONUS = 0.2


def trainer(loss: str, bf16: bool, only_signal: bool) -> Any:
    """Return the one trainer of these switches with another loss, which TRL reads anew for each batch."""
    made = trainer_of_any_loss(bf16, only_signal)
    made.loss_type = made.args.loss_type = loss
    return made


@cache
def trainer_of_any_loss(bf16: bool, only_signal: bool) -> Any:
    made: Any = world.trainer(Path(mkdtemp()), sections={"only_signal": only_signal}, loss_type="grpo", bf16=bf16)
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


def row_of(prompt: Tensor, completion: Tensor) -> CompletionRow:
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    values = (prompt, torch.ones_like(prompt), completion, torch.ones_like(completion))
    return CompletionRow(dict(zip(names, values, strict=True)), (0.0,), None, None)


@st.composite
def rows(draw: st.DrawFn) -> tuple[CompletionRow, float]:
    """A rollout and its advantage: short or long, truncated, silent, of now or of a policy far away."""
    prompt, completion = (
        torch.tensor(draw(st.lists(st.integers(0, 15), min_size=1, max_size=9))) for _ in ("prompt", "completion")
    )
    row = row_of(prompt, completion)
    if draw(st.booleans()):
        row = row.silent()
    old = draw(st.sampled_from([None, -25.0, -3.0, 0.0]))
    row = row.with_own_log_probs() if old is None else row.with_log_probs(torch.full((len(completion),), old))
    return row, draw(st.sampled_from([0.0, 0.0, 1.5, -2.5]))


def micro_batch(drawn: list[tuple[CompletionRow, float]], older: bool) -> dict[str, Any]:
    columns = join_rows([row for row, _ in drawn], pad_token=0, multiple=None)
    if not older:
        del columns[LOG_PROBS]
    tokens = columns["completion_mask"].sum().clamp(min=1)  # a batch has some, though of this part all may be silent
    return {**columns, "advantages": torch.tensor([advantage for _, advantage in drawn]), "num_items_in_batch": tokens}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@settings(max_examples=8, deadline=None)
@given(loss=st.sampled_from(LOSSES), drawn=st.lists(rows(), min_size=1, max_size=6), older=st.booleans())
def test_a_finite_loss_has_a_finite_gradient_and_rows_without_signal_have_no_part_in_it(
    bf16: bool, loss: str, drawn: list[tuple[CompletionRow, float]], older: bool
) -> None:
    inputs = micro_batch(drawn, older)
    whole, part = (gradient(trainer(loss, bf16, only_signal), inputs) for only_signal in (False, True))
    assert whole.isfinite().all()
    assert part.isfinite().all()
    largest = max(1e-6, float(whole.abs().max()))
    assert torch.allclose(part / largest, whole / largest, atol=0.1 if bf16 else 1e-4)


# -- rows that fill a batch up -----------------------------------------------------------------------------------------

NINE = [torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5][: 3 + place % 4]) for place in range(9)]
FILLED = 16


def nine(silent: int = 0) -> dict[str, Any]:
    """Nine answers of different lengths, and rows that fill the batch up."""
    rows = [row_of(ids[:2], ids) for ids in NINE]
    filled = [(row, 1.5 - place % 3) for place, row in enumerate(rows)] + [(rows[-1].silent(), 0.0)] * silent
    inputs = micro_batch(filled, older=True)
    rows_and_tokens = inputs["completion_ids"].shape
    return {**inputs, "ref_per_token_logps": torch.linspace(-4, -2, rows_and_tokens[1]).expand(rows_and_tokens)}


def sixteen() -> dict[str, Any]:
    """The same nine answers in a batch of sixteen rows."""
    return {**nine(FILLED - 9), SCALE: torch.tensor(FILLED / 9)}


def loss_of(made: Any, inputs: dict[str, Any]) -> float:
    with torch.no_grad():
        return float(made.compute_loss(made.model, dict(inputs)))


@pytest.mark.parametrize(("bonus", "beta"), [(0.0, 0.0), (BONUS, 0.3)], ids=["plain", "entropy bonus and KL"])
@pytest.mark.parametrize("loss", ["grpo", "sapo", "dr_grpo", "luspo", "dapo", "bnpo"])
def test_rows_that_fill_a_batch_up_change_no_term_of_the_loss(
    loss: str, bonus: float, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(loss, False, False)
    for name, value in {"entropy_coef": bonus, "_entropy_bonus_enabled": bonus > 0, "beta": beta}.items():
        monkeypatch.setattr(made, name, value, raising=False)
    assert loss_of(made, nine()) != 0
    assert loss_of(made, sixteen()) == pytest.approx(loss_of(made, nine()), rel=1e-5)
    assert torch.allclose(gradient(made, sixteen()), gradient(made, nine()), atol=1e-6)
    assert made.beta == beta


def with_router() -> Any:
    """Return a trainer of a small mixture of experts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=len(character_tokenizer()), **sizes, **heads))
    made: Any = world.trainer(Path(mkdtemp()), loss_type="grpo", model=model, router_aux_loss_coef=0.5)
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


def test_the_loss_of_a_router_is_not_scaled() -> None:
    """With advantages of zero it is all of the loss: the same with a scale and without one."""
    made = with_router()
    batch = {**sixteen(), "advantages": torch.zeros(FILLED)}
    without = {name: value for name, value in batch.items() if name != SCALE}
    assert loss_of(made, without) != 0
    assert loss_of(made, batch) == loss_of(made, without)


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_with_signal_come_first_in_each_update_and_the_gradient_stays(loss: str) -> None:
    parts = [micro_batch(PARTS[place], older=False) for place in range(4)]
    tokens = torch.tensor(sum(int(part["num_items_in_batch"]) for part in parts))
    parts = [{**part, "num_items_in_batch": tokens} for part in parts]
    packed = signal_first(parts, together=2)
    assert [part["advantages"].tolist() for part in packed] == [[1.5, -1.5], [0.0, 0.0], [1.0, 2.0], [-3.0, 0.0]]
    for update in (slice(0, 2), slice(2, 4)):
        whole, part = (accumulated(trainer(loss, False, True), found[update]) for found in (parts, packed))
        assert torch.allclose(part, whole, atol=1e-5)


@pytest.mark.parametrize(("count", "together"), [(3, 2), (2, 3)])
def test_no_row_moves_to_another_update_where_one_has_parts_of_two_batches(count: int, together: int) -> None:
    parts = [micro_batch(PARTS[place], older=False) for place in range(count)]
    packed = signal_first(parts, together)
    assert [part["advantages"].tolist() for part in packed] == [part["advantages"].tolist() for part in parts]


def accumulated(of: Any, parts: list[dict[str, Any]]) -> Tensor:
    return torch.stack([gradient(of, part) for part in parts]).sum(0)


def plain(ids: list[int], advantage: float) -> tuple[CompletionRow, float]:
    return row_of(torch.tensor(ids[:2]), torch.tensor(ids[2:])).with_own_log_probs(), advantage


PARTS = [
    [plain([1, 2, 3, 4], 0.0), plain([1, 2, 5, 6], 1.5)],
    [plain([7, 2, 3, 4], 0.0), plain([7, 2, 5, 6], -1.5)],
    [plain([1, 9, 3, 4], 1.0), plain([1, 9, 5, 6], 2.0)],
    [plain([4, 2, 3, 4], 0.0), plain([4, 2, 5, 8], -3.0)],
]
