"""The longest text for which a model attends from every token to all before it, as the engine does.

The engine refuses longer texts: it would generate from another distribution than the one that is trained. The model's
config names the limit (``bounds``); the model's masks are read as well (``hides``), since the keys of configs vary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from goldilocks.errors import require

_Mask = Callable[..., Any]  # whether a query sees a key, by row, head, and the positions of both
_NAME = "goldilocks_reach"
_KNOWN = "max_position_embeddings"
_OTHER = (
    ", or another engine (verl: rollout.name=vllm; TRL: no engine_slots): "
    "in Goldilocks' each token attends to all before it"
)
# Keys of a config that shorten attention, and the layers they hold for, where the config names its layers.
_LAYERS = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}


def bounds(config: Any) -> dict[str, int]:
    """The keys of a model's config that end its plain attention, each with the longest text that it leaves whole."""
    text = config.get_text_config()
    known = getattr(text, _KNOWN, None)
    return {
        **({} if known is None else {_KNOWN: known}),
        **_windows(text),
        **_temperature(text),
        **_long_rope(text),
    }


def check_length(config: Any, length: int, name: str = "max_length") -> None:
    """Raise ``ValueError`` where the engine would attend otherwise than the model; ``name`` is what sets the length."""
    require(length >= 2, name, length, "2 or more")
    for key, longest in bounds(config).items():
        other = "" if key == _KNOWN else _OTHER
        require(length <= longest, name, length, f"the model's {key}={longest} or less{other}")


def check_masks(model: PreTrainedModel, length: int) -> None:
    """``check_length`` by the masks that ``model`` makes."""
    reach = f"less, within the reach of every layer of {type(model).__name__}"
    require(not hides(model, length), "max_length", length, f"{reach}{_OTHER}")


@torch.inference_mode()
def hides(model: PreTrainedModel, length: int) -> bool:
    """Whether some layer hides the first of ``length`` tokens from the last, or shows the first one the last."""
    first, last = torch.tensor([0, length - 1], device=model.device)
    return any(not mask(0, 0, last, first) or mask(0, 0, first, last) for mask in _masks(model))


def _masks(model: PreTrainedModel) -> list[_Mask]:
    """The function behind the mask of each layer, seen in a pass over one token. Some models make no masks."""
    made: dict[int, tuple[Tensor, _Mask]] = {}  # by address; the tensor is kept so that no other takes its address
    used: list[_Mask] = []

    def mask(*_: Any, mask_function: _Mask, **__: Any) -> Tensor:
        one = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
        made[one.data_ptr()] = one, mask_function
        return one

    def attention(*states: Any, attention_mask: Tensor | None = None, **options: Any) -> Any:
        given = states[4] if len(states) > 4 else attention_mask  # after module, query, key and value
        used.extend(
            function for one, function in made.values() if given is not None and one.data_ptr() == given.data_ptr()
        )
        module, query, key, value = states[:4]
        return sdpa_attention_forward(module, query, key, value, given, **options)

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return used


def _windows(text: Any) -> dict[str, int]:
    layers = getattr(text, "layer_types", None)
    sizes = {key: getattr(text, key, None) for key, layer in _LAYERS.items() if layers is None or layer in layers}
    if not getattr(text, "use_sliding_window", True):
        sizes.pop("sliding_window", None)
    return {key: size for key, size in sizes.items() if size}


def _temperature(text: Any) -> dict[str, int]:
    """Llama 4 sharpens attention from this position on, which it counts by its own cache instead of ours."""
    scale = getattr(text, "floor_scale", None)
    return {"floor_scale": int(scale)} if scale and getattr(text, "attn_temperature_tuning", False) else {}


def _long_rope(text: Any) -> dict[str, int]:
    """Beyond this length the frequencies of the whole batch change, and with them what is cached already."""
    key = "original_max_position_embeddings"
    found = [rope.get(key) or getattr(text, key, None) for rope in _ropes(text) if _kind(rope) == "longrope"]
    return {key: min(filter(None, found))} if any(found) else {}


def _ropes(text: Any) -> Iterator[Mapping[str, Any]]:
    """The settings of rotary embeddings: one, or one for each kind of layer."""
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    yield given
    yield from (value for value in given.values() if isinstance(value, Mapping))


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type")
