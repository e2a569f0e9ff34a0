"""New weights into a live model, in place: no tensor changes its address, so captured graphs stay valid."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.inference_mode()
def load(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy each named tensor over the model's own. Names the model lacks and other shapes are errors.

    Tied tensors may come under one of their names or under all; then they must be equal.
    """
    own = model.state_dict()
    written: dict[int, str] = {}
    for name, tensor in weights:
        target = own.get(name)
        if target is None:
            raise ValueError(f"weight {name!r} is not in {type(model).__name__}; it has e.g. {sorted(own)[:3]}")
        if target.shape != tensor.shape:
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}; the model's is {tuple(target.shape)}")
        tensor = tensor.to(target.device, target.dtype)
        first = written.setdefault(target.data_ptr(), name)
        if first == name:
            target.copy_(tensor)
        elif not torch.equal(target, tensor):
            raise ValueError(
                f"weights {first!r} and {name!r} are tied in {type(model).__name__} but came with other values"
            )
