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


def settle(model: nn.Module) -> None:
    """Keep the frequencies that ``model`` has now, where its embeddings choose them by the longest row of each call.

    Below the length the model was first trained for the choice is always the same, and an engine goes no further.
    Making it waits for the device, which the capture of a graph cannot.
    """
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = _settled(kind)  # type: ignore[assignment]
        elif isinstance(kind, dict):  # by the kind of layer
            module.rope_type = {layer: _settled(name) for layer, name in kind.items()}  # type: ignore[assignment]


def _settled(kind: str) -> str:
    return "default" if kind == "longrope" or "dynamic" in kind else kind


def fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel may rotate these: whole heads, of the types and strides that it was compared with.

    Models with partial rotary embeddings (GPT-NeoX, Phi-4-mini, GLM-4-MoE) have a ``cos`` narrower than a head, which
    the kernel would read past. A ``cos`` of another type (OLMo 2 keeps float32) rounds elsewhere.
    """
    if q.ndim != 4 or k.ndim != 4:
        return False
    rows, _, tokens, size = q.shape
    return (
        size % 2 == 0
        and k.shape[:1] + k.shape[2:] == q.shape[:1] + q.shape[2:]
        and cos.shape in ((rows, tokens, size), (1, tokens, size))
        and cos.shape == sin.shape
        and cos.stride() == sin.stride()
        and {q.dtype, k.dtype, cos.dtype, sin.dtype} == {q.dtype}
        and q.stride(-1) == k.stride(-1) == cos.stride(-1) == 1
    )


def _apply(original: _Rotary, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not fits(q, k, cos, sin):
        return original(q, k, cos, sin, *args, **kwargs)
    from goldilocks.engine import kernels  # needs Triton, which only comes with a CUDA build of torch

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
