"""Which norms and rotary embeddings the GPU kernels may take the place of, and that they then compute the same.

The comparisons with the kernels themselves need a GPU, or Triton's interpreter: ``TRITON_INTERPRET=1 pytest …``.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor, nn
from unit.engine.architectures import SUPPORTED, fresh

from goldilocks.engine.fused import fits_norm, fits_rotary, fuse_norms, fused_rotary, settle_rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
with_kernels = pytest.mark.skipif(
    not torch.cuda.is_available()
    and not (os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton")),
    reason="needs a CUDA device, or Triton with TRITON_INTERPRET=1",
)


def angles(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)


def test_the_kernel_rotates_whole_heads_only() -> None:
    q, k = torch.zeros(2, 4, 5, 16), torch.zeros(2, 2, 5, 16)
    assert fits_rotary(q, k, *angles(2, 5, 16))
    assert fits_rotary(q, k, *angles(1, 5, 16))
    assert not fits_rotary(q, k, *angles(2, 5, 8))
    assert not fits_rotary(q, k, *angles(2, 1, 16))
    assert not fits_rotary(q, k, *angles(5, 16))
    assert not fits_rotary(q[..., :15], k[..., :15], *angles(2, 5, 15))
    assert not fits_rotary(q, k[..., :8], *angles(2, 5, 16))
    assert not fits_rotary(q[0], k[0], *angles(2, 5, 16))


def test_the_kernel_rotates_what_it_was_compared_with() -> None:
    q, k = torch.zeros(2, 4, 5, 16, dtype=torch.bfloat16), torch.zeros(2, 2, 5, 16, dtype=torch.bfloat16)
    assert fits_rotary(q, k, *angles(2, 5, 16, dtype=torch.bfloat16))
    assert not fits_rotary(q, k, *angles(2, 5, 16, dtype=torch.float32))
    cos, sin = angles(2, 16, 5)
    assert not fits_rotary(q.float(), k.float(), cos.transpose(1, 2), sin.transpose(1, 2))


def test_settled_frequencies_are_those_of_short_texts_and_stay() -> None:
    model, plain = fresh("phi3_longrope"), fresh("phi3_longrope")
    short, long = torch.arange(40)[None], torch.arange(60)[None]  # 40 is the model's original length
    with torch.inference_mode():
        settle_rotary(model)
        assert torch.equal(model(short).logits, plain(short).logits)
        assert not torch.allclose(model(long).logits[:, :40], plain(long).logits[:, :40], atol=0.01)
        # Rounding may follow the shape: another number of tokens may take another kernel.
        torch.testing.assert_close(model(long).logits[:, :40], model(short).logits, atol=1e-4, rtol=0.0)


def test_the_kernel_normalises_rows_as_long_as_the_weight() -> None:
    weight = torch.zeros(16)
    assert fits_norm(torch.zeros(2, 5, 16), weight)
    assert not fits_norm(torch.zeros(2, 5, 32), weight)
    assert not fits_norm(torch.zeros(2, 5, 16, dtype=torch.bfloat16), weight)


class Norm(nn.Module):
    """The RMS norm of Llama, with something else about it."""

    def __init__(self, *, bias: bool = False, inner: float = 0.0, outer: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))
        self.bias = nn.Parameter(torch.zeros(24)) if bias else None
        self.eps, self.inner, self.outer = 1e-6, inner, outer

    def forward(self, states: Tensor) -> Tensor:
        root = (states.pow(2).mean(-1, keepdim=True) + self.inner).sqrt() + self.outer
        normed = self.weight * (states / root)
        return normed if self.bias is None else normed + self.bias


@with_kernels
def test_a_norm_is_fused_if_it_is_the_function_of_the_kernel() -> None:
    for norm, same in (
        (Norm(inner=1e-6), True),
        (Norm(inner=1e-6, bias=True), False),  # the bias is zero until weights are loaded
        (Norm(outer=1e-6), False),  # eps after the root: alike for all but small states
        (Norm(inner=1e-5), False),  # another eps than the attribute says
    ):
        norm.to(DEVICE)
        fuse_norms(norm)
        assert ("forward" in vars(norm)) is same


@with_kernels
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_fused_model_computes_what_the_model_does(name: str) -> None:
    model, plain = fresh(name).to(DEVICE), fresh(name).to(DEVICE)
    ids = torch.arange(3, 21, device=DEVICE).view(2, 9)
    fuse_norms(model)
    with torch.inference_mode():
        expected = plain(ids).logits
        with fused_rotary(model, torch.float32, torch.device(DEVICE)):
            fused = model(ids).logits
    torch.testing.assert_close(fused, expected, atol=1e-4, rtol=1e-4)
