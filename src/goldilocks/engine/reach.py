"""How long a text may be: the engine attends from every token to all before it, and some models do not.

The engine refuses a text beyond the longest for which the model attends so: it would generate from another distribution
than the one that is trained. The model's config names the limit (``bounds``); the model's masks are read as well
(``hides``), since the keys of configs vary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from goldilocks.errors import require

_Mask = Callable[..., Any]  # whether a query sees a key, by row, head, and the positions of both
_REACH = "goldilocks_reach"
_KNOWN = "max_position_embeddings"
ANOTHER_ENGINE = (
    ", or another engine (verl: rollout.name=vllm; TRL: no engine_slots): "
    "in Goldilocks' each token attends to all before it"
)
# Keys of a config that shorten attention, and the layers they hold for, where the config names its layers.
_LAYERS = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}


def bounds(config: Any) -> dict[str, int]:
    """The keys of a model's config that end its plain attention, each with the longest text that it leaves whole."""
    text = config.get_text_config()
    layers = getattr(text, "layer_types", None)
    keys = [_KNOWN, *(key for key, layer in _LAYERS.items() if layers is None or layer in layers)]
    found = {key: getattr(text, key, None) for key in keys}
    if not getattr(text, "use_sliding_window", True):
        found.pop("sliding_window", None)
    if getattr(text, "attn_temperature_tuning", False):
        # Llama 4 sharpens attention from this position on, which it counts by its own cache instead of ours.
        found["floor_scale"] = getattr(text, "floor_scale", None)
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for rope in (given, *(value for value in given.values() if isinstance(value, Mapping))):  # one, or one a layer kind
        if (rope.get("rope_type") or rope.get("type")) == "longrope":
            # Beyond this length the frequencies of the whole batch change, and with them what is cached already.
            key = "original_max_position_embeddings"
            lengths = (found.get(key), rope.get(key) or getattr(text, key, None))
            found[key] = min(filter(None, lengths), default=None)
    return {key: int(length) for key, length in found.items() if length}


def check_length(config: Any, length: int, name: str = "max_length") -> None:
    """Raise ``ValueError`` where the engine would attend otherwise than the model; ``name`` is what sets the length."""
    require(length >= 2, name, length, "2 or more")
    for key, longest in bounds(config).items():
        other = "" if key == _KNOWN else ANOTHER_ENGINE
        require(length <= longest, name, length, f"the model's {key}={longest} or less{other}")


@torch.inference_mode()
def hides(model: PreTrainedModel, length: int) -> bool:
    """Whether some layer hides the first of ``length`` tokens from the last, or shows the first one the last.

    The function behind the mask of each layer is seen in a pass over one token. Some models make no masks.
    """
    made: dict[int, tuple[Tensor, _Mask]] = {}  # by address; the tensor is kept so that no other takes its address
    used: list[_Mask] = []

    def mask(*_: Any, mask_function: _Mask, **__: Any) -> Tensor:
        one = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
        made[one.data_ptr()] = one, mask_function
        return one

    def attention(*states: Any, attention_mask: Tensor | None = None, **options: Any) -> Any:
        given = states[4] if len(states) > 4 else attention_mask  # after module, query, key and value
        if given is not None and given.data_ptr() in made:
            used.append(made[given.data_ptr()][1])
        module, query, key, value = states[:4]
        return sdpa_attention_forward(module, query, key, value, given, **options)

    AttentionMaskInterface.register(_REACH, mask)
    with attending(model, _REACH, attention):
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    first, last = torch.tensor([0, length - 1], device=model.device)
    return any(not shows(0, 0, last, first) or shows(0, 0, first, last) for shows in used)


@contextmanager
def attending(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Have every layer of ``model`` attend by ``function`` within the block; transformers knows it by ``name``."""
    AttentionInterface.register(name, function)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
