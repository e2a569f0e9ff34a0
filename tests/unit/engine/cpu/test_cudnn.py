"""Attention is not cuDNN's; on a GPU its gradients are finite at every length."""

from __future__ import annotations

import math

import pytest
import torch

from goldilocks.engine.cpu import avoid_cudnn


@pytest.mark.parametrize(("patches", "cudnns"), [("all", False), ("none", True)])
def test_attention_is_left_to_other_kernels_than_cudnns_unless_no_patch_is_wanted(
    patches: str, cudnns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOLDILOCKS_PATCHES", patches)
    torch.backends.cuda.enable_cudnn_sdp(True)
    avoid_cudnn()
    assert torch.backends.cuda.cudnn_sdp_enabled() is cudnns


def query_gradient(length: int) -> torch.Tensor:
    """Of a masked attention whose scores are all near -120."""
    torch.manual_seed(0)
    size = 64
    query, key, value = (torch.randn(1, 1, length, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    query[..., 0], key[..., 0] = 1.0, -120 * math.sqrt(size)
    query.requires_grad_()
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()
    assert query.grad is not None
    return query.grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("length", [63, 64, 128, 192, 320])
def test_gradients_are_finite_at_every_length_without_cudnn(length: int) -> None:
    avoid_cudnn()
    assert query_gradient(length).isfinite().all()
