"""New weights into a live model, in place: no tensor changes its address, so captured graphs stay valid."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.inference_mode()
def load(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy each named tensor over the model's own. Names the model lacks and other shapes are errors.

    Tied tensors may come under one of their names or under all; then they must be equal. Values that are not finite
    are an error too: a policy that has diverged would go on to sample noise.
    """
    own = model.state_dict()
    written: dict[int, str] = {}
    finite: dict[str, Tensor] = {}
    for name, tensor in weights:
        target = own.get(name)
        if target is None:
            raise ValueError(f"weight {name!r} is not in {type(model).__name__}; it has e.g. {sorted(own)[:3]}")
        if target.shape != tensor.shape:
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}; the model's is {tuple(target.shape)}")
        tensor = tensor.to(target.device, target.dtype)
        if tensor.is_floating_point():
            finite[name] = tensor.isfinite().all()
        first = written.setdefault(target.data_ptr(), name)
        if first == name:
            target.copy_(tensor)
        elif not torch.equal(target, tensor) and finite.get(name, True):
            raise ValueError(
                f"weights {first!r} and {name!r} are tied in {type(model).__name__} but came with other values"
            )
    if finite and not torch.stack([*finite.values()]).all():  # one transfer from the device
        wrong = [name for name, is_finite in finite.items() if not is_finite]
        raise ValueError(f"weight {wrong[0]!r} and {len(wrong) - 1} more are not finite: the training has diverged")
