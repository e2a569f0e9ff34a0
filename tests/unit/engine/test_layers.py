"""Which layers of a model the GPU kernels may replace, and that they compute the same.

The comparisons with the kernels need a GPU, or Triton's interpreter: ``TRITON_INTERPRET=1 pytest …``.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from unit.engine.architectures import fresh

from goldilocks.engine import layers
from goldilocks.engine.decoder import SLOT_ATTENTION, KernelWindow, KVStore, PrefillWindow
from goldilocks.engine.engine import overwrite
from goldilocks.engine.layers import settle_rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
with_kernels = pytest.mark.skipif(
    not torch.cuda.is_available()
    and not (os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton")),
    reason="needs a CUDA device, or Triton with TRITON_INTERPRET=1",
)
PARTS = ("weight", "bias")
PLAIN = ("llama", "mistral", "qwen2", "qwen3")


def test_joined_layers_are_one_product_and_their_weights_still_arrive_in_place() -> None:
    model = fresh("qwen2")
    own = model.model.layers[0].self_attn
    parts = [own.q_proj, own.k_proj, own.v_proj]
    names = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    joined = layers.join(*parts)
    states = torch.randn(3, 32)
    torch.testing.assert_close(joined(states), torch.cat([part(states) for part in parts], 1))
    new = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items() if "lm_head" not in name}
    overwrite(model, new.items())
    expected = [torch.cat([new[f"model.layers.0.self_attn.{one}_proj.{part}"] for one in "qkv"]) for part in PARTS]
    assert torch.equal(joined.weight, expected[0])
    assert torch.equal(joined.bias, expected[1])
    moved = {name for name, parameter in model.named_parameters() if parameter.data_ptr() != names[name]}
    assert moved == {f"model.layers.0.self_attn.{one}_proj.{part}" for one in "qkv" for part in PARTS}


def test_a_model_with_other_parts_keeps_its_own_modules() -> None:
    class Adapted(nn.Linear):
        pass

    assert not layers.fits(fresh("granite"))  # scales its residuals
    other = fresh("llama")
    other.model.layers[1].mlp.up_proj = Adapted(32, 48, bias=False)
    assert not layers.fits(other)
    mixed = fresh("llama")
    mixed.model.norm.to(torch.bfloat16)
    assert not layers.fits(mixed)
    rectified = fresh("llama")
    rectified.config.hidden_act = "relu"
    assert not layers.fits(rectified)


@pytest.mark.skipif(DEVICE == "cuda" or "TRITON_INTERPRET" in os.environ, reason="the kernels run here")
def test_a_model_whose_kernels_cannot_run_keeps_its_own_modules_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    assert not layers.fits(fresh("llama"))
    assert "the layers of LlamaForCausalLM are not fused: " in caplog.text


@with_kernels
@pytest.mark.parametrize("name", PLAIN)
def test_the_logits_and_the_cache_are_those_of_the_models_own_modules(name: str) -> None:
    model = fresh(name).to(DEVICE)
    model.set_attn_implementation(SLOT_ATTENTION)
    assert layers.fits(model)
    own = model.model.layers[0].self_attn
    rows, length = 5, 60
    shape = model.config.num_key_value_heads, own.head_dim, own.head_dim
    torch.manual_seed(0)
    stores = [KVStore([shape, shape], rows + 1, length, torch.float32, torch.device(DEVICE)) for _ in range(2)]
    for ours, theirs in zip(_tensors(stores[0]), _tensors(stores[1]), strict=True):
        theirs.copy_(ours.normal_())
    columns = torch.tensor([0, 1, 17, 40, 59], device=DEVICE)
    with torch.inference_mode():
        expected = _own(model, columns, stores[1])
        logits = layers.Fused(model, length).step(columns, columns, stores[0])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(_own(model, columns, stores[1]), expected)  # of weights that are views now
    for ours, theirs in zip(_tensors(stores[0]), _tensors(stores[1]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@with_kernels
@pytest.mark.parametrize("name", PLAIN)
def test_prompts_fill_the_cache_as_the_models_own_modules_do(name: str) -> None:
    model = fresh(name).to(DEVICE)
    model.set_attn_implementation(SLOT_ATTENTION)
    own = model.model.layers[0].self_attn
    shape = model.config.num_key_value_heads, own.head_dim, own.head_dim
    stores = [KVStore([shape, shape], 6, 20, torch.float32, torch.device(DEVICE)) for _ in range(2)]
    torch.manual_seed(0)
    tokens, rows = torch.randint(61, (3, 9), device=DEVICE), torch.tensor([4, 0, 2], device=DEVICE)
    positions = torch.arange(9, device=DEVICE).expand(3, -1)
    with torch.inference_mode():
        mask, window = positions.int()[:, None, :, None], PrefillWindow(stores[1], rows)
        model(input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=window, use_cache=True)
        layers.Fused(model, 20).fill(tokens, rows, stores[0])
    assert stores[0].keys[1][rows, :, :9].abs().min() > 0
    for ours, theirs in zip(_tensors(stores[0]), _tensors(stores[1]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@with_kernels
def test_layers_that_compute_something_else_do_not_agree() -> None:
    class Other(LlamaForCausalLM):
        def __init__(self, config: object) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp.register_forward_hook(lambda _, __, out: 1.1 * out)

    model = fresh("llama").to(DEVICE)
    assert layers.agrees(model)
    assert not layers.agrees(Other(model.config).to(DEVICE))


def _tensors(store: KVStore) -> list[Tensor]:
    return [*store.keys, *store.values]


def _own(model: nn.Module, columns: Tensor, store: KVStore) -> Tensor:
    logits: Tensor = model(
        input_ids=columns[:, None],
        position_ids=columns[:, None],
        attention_mask=columns.int()[:, None, None, None],
        past_key_values=KernelWindow(store, columns),
        use_cache=True,
    ).logits[:, -1]
    return logits


def test_settled_frequencies_are_those_of_short_texts_and_stay() -> None:
    model, plain = fresh("phi3_longrope"), fresh("phi3_longrope")
    short, long = torch.arange(40)[None], torch.arange(60)[None]  # 40 is the model's original length
    with torch.inference_mode():
        settle_rotary(model)
        assert torch.equal(model(short).logits, plain(short).logits)
        assert not torch.allclose(model(long).logits[:, :40], plain(long).logits[:, :40], atol=0.01)
        # Rounding may follow the shape: another number of tokens may take another kernel.
        torch.testing.assert_close(model(long).logits[:, :40], model(short).logits, atol=1e-4, rtol=0.0)
