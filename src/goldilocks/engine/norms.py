"""RMS norms of a model in one GPU kernel each instead of seven, rounding where transformers rounds.

A third of the kernels of a decode step belong to norms. Only a module that is seen to compute this function is
replaced; every other norm stays as it is.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from goldilocks.engine import kernels


def fuse(model: nn.Module) -> None:
    """Replace the forward of each RMS norm of ``model``, on that instance only."""
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if (
            isinstance(eps, float)
            and isinstance(weight, Tensor)
            and weight.ndim == 1
            and _is_rms_norm(module, weight, eps)
        ):
            module.forward = partial(kernels.rms_norm, weight=weight, eps=eps)


@torch.inference_mode()
def _is_rms_norm(module: nn.Module, weight: Tensor, eps: float) -> bool:
    """Whether the module agrees with the kernel, up to rounding, for weights and inputs drawn at random."""
    generator = torch.Generator(weight.device).manual_seed(0)
    drawn = torch.randn(9, len(weight), generator=generator, device=weight.device).to(weight.dtype)
    other, states = drawn[0], drawn[1:]
    theirs = functional_call(module, {"weight": other}, (states,))
    ours = kernels.rms_norm(states, other, eps)
    return theirs.dtype == ours.dtype and torch.allclose(ours, theirs, rtol=4 * torch.finfo(weight.dtype).eps, atol=0)
