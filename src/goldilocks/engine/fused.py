"""RMS norms and rotary embeddings in one GPU kernel each, not seven and five, rounding where transformers rounds.

A third of the kernels of a decode step belong to norms. A module or function is replaced only where it is seen to
compute the same: a norm on its instance, and ``apply_rotary_pos_emb`` of a model's module while a graph is captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

ROTARY = "apply_rotary_pos_emb"
Rotary = Callable[..., tuple[Tensor, Tensor]]


def fuse_norms(model: nn.Module) -> None:
    """Replace the forward of each RMS norm of ``model``, on that instance only."""
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = _only_weight(module)
        if isinstance(eps, float) and weight is not None and _is_rms_norm(module, weight, eps):
            module.forward = partial(_norm, module.forward, weight, eps)


def _norm(original: Callable[..., Any], weight: Tensor, eps: float, states: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not fits_norm(states, weight):
        return original(states, *args, **kwargs)
    from goldilocks.engine import kernels  # needs Triton, which only comes with a CUDA build of torch

    return kernels.rms_norm(states, weight, eps)


def fits_norm(states: Tensor, weight: Tensor) -> bool:
    """Whether the kernel may normalise these: rows as long as the weight, and of its type."""
    return states.shape[-1:] == weight.shape and states.dtype == weight.dtype


def _only_weight(module: nn.Module) -> Tensor | None:
    """The module's weight, if it has nothing else: a bias that is still zero would not show in the comparison."""
    held = dict([*module.named_parameters(), *module.named_buffers()])
    weight = held.get("weight")
    return weight if weight is not None and len(held) == weight.ndim == 1 and weight.is_contiguous() else None


@torch.inference_mode()
def _is_rms_norm(module: nn.Module, weight: Tensor, eps: float) -> bool:
    """Whether the module agrees with the kernel, up to rounding, for weights and inputs drawn at random.

    Half of the inputs are as small as ``eps`` is under the root, so that another place or value of it shows.
    """
    generator = torch.Generator(weight.device).manual_seed(0)
    drawn = torch.randn(9, len(weight), generator=generator, device=weight.device)
    drawn[5:] *= eps**0.5
    other, *states = drawn.to(weight.dtype)
    inputs = torch.stack(states)
    theirs = functional_call(module, {"weight": other}, (inputs,))
    ours = _norm(module.forward, other, eps, inputs)
    return theirs.dtype == ours.dtype and torch.allclose(ours, theirs, rtol=8 * torch.finfo(weight.dtype).eps, atol=0)


@contextmanager
def fused_rotary(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Within the block, the layers of ``model`` rotate with our kernel."""
    found = {name: getattr(sys.modules[name], ROTARY, None) for name in {type(m).__module__ for m in model.modules()}}
    originals = {
        name: rotary for name, rotary in found.items() if rotary is not None and _is_rotary(rotary, dtype, device)
    }
    try:
        for name, original in originals.items():
            setattr(sys.modules[name], ROTARY, partial(_rotate, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(sys.modules[name], ROTARY, original)


def settle_rotary(model: nn.Module) -> None:
    """Fix the frequencies of embeddings that choose them by the longest row of each call.

    The choice waits for the device, which the capture of a graph cannot. It is always the same below the length that
    the model was first trained for, and an engine goes no further.
    """
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = _settled(kind)  # type: ignore[assignment]
        elif isinstance(kind, dict):  # by the kind of layer
            module.rope_type = {layer: _settled(name) for layer, name in kind.items()}  # type: ignore[assignment]


def _settled(kind: str) -> str:
    return "default" if kind == "longrope" or "dynamic" in kind else kind


def fits_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
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


def _rotate(original: Rotary, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not fits_rotary(q, k, cos, sin):
        return original(q, k, cos, sin, *args, **kwargs)
    from goldilocks.engine import kernels  # needs Triton, which only comes with a CUDA build of torch

    return kernels.rotate(q, cos, sin), kernels.rotate(k, cos, sin)


@torch.inference_mode()
def _is_rotary(rotary: Rotary, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``rotary`` agrees with the kernel for inputs drawn at random."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, cos, sin = torch.randn(4, 2, 3, 5, 16, generator=generator, device=device).to(dtype)
    cos, sin = cos[:, 0], sin[:, 0]
    try:
        theirs = rotary(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):  # other arguments: another function by the same name
        return False
    rounding = 16 * torch.finfo(dtype).eps
    pairs = zip(_rotate(rotary, q, k, cos, sin), theirs, strict=True)
    return all(torch.allclose(ours, their, rtol=0, atol=rounding) for ours, their in pairs)
