"""New weights into a live model, in place: no tensor changes its address, so captured graphs stay valid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


@torch.inference_mode()
def load(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy each named tensor over the model's own. Unknown names, other shapes and values that are not finite raise.

    Tied tensors may come under one of their names or under all; then they must be equal.
    """
    own = model.state_dict()
    written: dict[int, str] = {}
    finite: dict[str, Tensor] = {}
    for name, tensor in weights:
        target = _target(model, own, name, tensor)
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
    _check_finite(finite)


@torch.inference_mode()
def load_all(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """As ``load``, for weights that are all in memory: a few operations instead of a thousand."""
    own = model.state_dict()
    pairs: dict[int, tuple[str, Tensor, Tensor]] = {}
    for name, tensor in weights.items():
        target = _target(model, own, name, tensor)
        _, _, earlier = pairs.setdefault(target.data_ptr(), (name, target, tensor))
        if earlier.data_ptr() != tensor.data_ptr():  # tied here but not there: compare the values
            return load(model, weights.items())
    names, targets, sources = zip(*pairs.values(), strict=True)
    torch._foreach_copy_(targets, sources)
    real = {name: one for name, one in zip(names, targets, strict=True) if one.is_floating_point() and one.numel()}
    largest = torch._foreach_norm(list(real.values()), torch.inf)
    _check_finite(dict(zip(real, torch.stack(largest).isfinite(), strict=True)))
    return None


def _target(model: nn.Module, own: Mapping[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    target = own.get(name)
    if target is None:
        raise ValueError(f"weight {name!r} is not in {type(model).__name__}; it has e.g. {sorted(own)[:3]}")
    if target.shape != tensor.shape:
        raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}; the model's is {tuple(target.shape)}")
    return target


def _check_finite(finite: Mapping[str, Tensor]) -> None:
    if finite and not torch.stack([*finite.values()]).all():  # one transfer from the device
        wrong = [name for name, is_finite in finite.items() if not is_finite]
        raise ValueError(f"weight {wrong[0]!r} and {len(wrong) - 1} more are not finite: the training has diverged")
