"""New weights for a live model: read from the model that is trained, and copied in place.

No tensor changes its address, so captured graphs stay valid.

Of a model that PEFT trains, the weights are base and adapter merged, under the names that the base model has. The
trained model stays as it is. Each adapted layer is copied, PEFT merges the copy in fp32, and the copy is let go: no
more memory is taken than that of one layer.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from goldilocks.errors import require


@torch.inference_mode()
def load(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> set[int]:
    """Copy each named tensor over the model's own. Unknown names, other shapes and values that are not finite raise.

    Tied tensors may come under one of their names or under all; then they must be equal. Returns the addresses that
    were written, for ``check_all_arrived``.
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
    return {*written}


def check_all_arrived(model: nn.Module, written: Collection[int]) -> None:
    """Raise where a parameter is not among the addresses that ``load`` has written."""
    missing = [name for name, one in model.named_parameters() if one.numel() and one.data_ptr() not in written]
    if missing:
        raise ValueError(f"weight {missing[0]!r} and {len(missing) - 1} more of {type(model).__name__} did not arrive")


def is_adapted(model: nn.Module) -> bool:
    """Whether PEFT trains an adapter of the model."""
    return hasattr(model, "peft_config")


def check_adapters(model: Any, key: str, value: object) -> None:
    """Refuse adapters that cannot be merged; ``key`` and ``value`` are what asks for merged weights."""
    for adapter in model.peft_config.values():
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        require(not adapter.is_prompt_learning, key, value, f"none with PEFT's {kind}, which has nothing to merge")
    packed = getattr(model.config, "quantization_config", None) is not None
    require(not packed, key, value, "none with an adapter of a quantized model: the engine has full weights")
    base = model.get_base_model()
    if getattr(base.config.get_text_config(), "tie_word_embeddings", False):
        # Both sides would be merged with different adapters, or with views that cannot be copied.
        sides = base.get_input_embeddings(), base.get_output_embeddings()
        first, last = ({id(one) for one in side.parameters() if one.requires_grad} for side in sides)
        accepted = (
            "none with an adapter of one side of tied embeddings (tie_word_embeddings): PEFT keeps both sides equal "
            "with modules_to_save=['embed_tokens'], ensure_weight_tying=True, and with trainable_token_indices"
        )
        require(first == last, key, value, accepted)


def merged(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of the base model by name, with the active adapters merged in."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = model.get_base_model()
    layers: dict[str, nn.Module] = {}  # what PEFT put in the place of a layer; of layers in one another, the outermost
    for name, module in base.named_modules():  # parents first
        adapted = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if adapted and not _is_inside(name, layers):
            layers[name] = module
    for name, tensor in base.state_dict().items():
        if not _is_inside(name, layers):
            yield name, tensor
    for name, layer in layers.items():
        for part, tensor in _merged_layer(layer).state_dict().items():
            yield f"{name}.{part}", tensor


def _is_inside(name: str, layers: Mapping[str, nn.Module]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:depth]) in layers for depth in range(1, len(parts)))


def _merged_layer(layer: nn.Module) -> nn.Module:
    own: Any = copy.deepcopy(layer).float()
    if hasattr(own, "unload_and_optionally_merge_module"):  # a layer that is trained whole, or by some of its rows
        module: nn.Module = own.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        return module
    for part in own.modules():
        if hasattr(part, "merge"):
            part.merge()
    base: nn.Module = own.get_base_layer()
    return base
