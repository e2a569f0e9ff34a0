"""Rotary embeddings of queries and keys in one GPU kernel each instead of five, rounding where transformers rounds.

Models call the function ``apply_rotary_pos_emb`` of their own module. It is replaced only inside a ``with`` block,
which is as long as the capture of a graph, and only where it is seen to compute the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from goldilocks.engine import kernels

_NAME = "apply_rotary_pos_emb"
_Rotary = Callable[..., tuple[Tensor, Tensor]]


@contextmanager
def fused(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Within the block, the modules that define the layers of ``model`` rotate with our kernel."""
    found = {name: getattr(sys.modules[name], _NAME, None) for name in {type(m).__module__ for m in model.modules()}}
    originals = {
        name: rotary for name, rotary in found.items() if rotary is not None and _is_ours(rotary, dtype, device)
    }
    try:
        for name, original in originals.items():
            setattr(sys.modules[name], _NAME, partial(_apply, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(sys.modules[name], _NAME, original)


def _apply(original: _Rotary, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    if kwargs or cos.stride() != sin.stride() or cos.stride(-1) != 1 or q.stride(-1) != 1 or k.stride(-1) != 1:
        return original(q, k, cos, sin, **kwargs)
    return kernels.rotate(q, cos, sin), kernels.rotate(k, cos, sin)


@torch.inference_mode()
def _is_ours(rotary: _Rotary, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``rotary`` agrees with the kernel for inputs drawn at random."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, cos, sin = torch.randn(4, 2, 3, 5, 16, generator=generator, device=device).to(dtype)
    cos, sin = cos[:, 0], sin[:, 0]
    try:
        theirs = rotary(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):  # other arguments: another function by the same name
        return False
    rounding = 16 * torch.finfo(dtype).eps
    pairs = zip(_apply(rotary, q, k, cos, sin), theirs, strict=True)
    return all(torch.allclose(ours, their, rtol=0, atol=rounding) for ours, their in pairs)
