"""RMS norms of a model in one GPU kernel each instead of seven, rounding where transformers rounds.

A third of the kernels of a decode step belong to norms. Only a module that is seen to compute this function is
replaced; every other norm stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def fuse(model: nn.Module) -> None:
    """Replace the forward of each RMS norm of ``model``, on that instance only."""
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = _only_weight(module)
        if isinstance(eps, float) and weight is not None and _is_rms_norm(module, weight, eps):
            module.forward = partial(_norm, module.forward, weight, eps)


def _norm(original: Callable[..., Any], weight: Tensor, eps: float, states: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not fits(states, weight):
        return original(states, *args, **kwargs)
    from goldilocks.engine import kernels  # needs Triton, which only comes with a CUDA build of torch

    return kernels.rms_norm(states, weight, eps)


def fits(states: Tensor, weight: Tensor) -> bool:
    """Whether the kernel may normalise these: rows as long as the weight, of its type, as when it was compared."""
    return states.shape[-1:] == weight.shape and states.dtype == weight.dtype


def _only_weight(module: nn.Module) -> Tensor | None:
    """The vector that the module has learnt, if that is all: a bias that is still zero would not show when compared."""
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
