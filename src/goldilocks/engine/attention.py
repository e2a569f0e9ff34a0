"""What the engine puts into a model: keys and values of every slot at fixed addresses, and the attention over them.

A slot is a row of every layer's tensors; column t of the row belongs to the token at position t. Nothing is ever
appended or reallocated while the store is held, so a captured CUDA graph stays valid. A model sees the store through a
window, which transformers takes for its cache.

The attention function is installed through transformers' own registry. Called by the engine, the 4-D
``attention_mask`` carries one of two things: integers, the last key position each query sees (prompts from position 0,
and single tokens on a GPU); or floats, an additive mask over the attended columns (single tokens on a CPU). Every other
call is plain scaled-dot-product attention: ``model.generate`` works unchanged.

The engine refuses a text beyond the longest for which the model attends from every token to all before it: the engine
would generate from another distribution than the one that is trained. The model's config names the limit (``bounds``);
the model's masks are read as well (``hides``), since the keys of configs vary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from goldilocks.errors import require

NAME = "goldilocks_slots"
_Mask = Callable[..., Any]  # whether a query sees a key, by row, head, and the positions of both
_REACH = "goldilocks_reach"
_KNOWN = "max_position_embeddings"
ANOTHER_ENGINE = (
    ", or another engine (verl: rollout.name=vllm; TRL: no engine_slots): "
    "in Goldilocks' each token attends to all before it"
)
# Keys of a config that shorten attention, and the layers they hold for, where the config names its layers.
_LAYERS = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}


class KVStore:
    """``keys`` and ``values`` hold one ``[slots, heads, length, head size]`` tensor per layer.

    Those of one shape are views of one tensor, so that rows of all layers are copied by one operation.
    """

    def __init__(
        self, shapes: list[tuple[int, int, int]], slots: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        wanted = [(heads, key) for heads, key, _ in shapes] + [(heads, value) for heads, _, value in shapes]
        self._stacks = {
            (heads, size): torch.zeros(count, slots, heads, length, size, dtype=dtype, device=device)
            for (heads, size), count in Counter(wanted).items()
        }
        views = {shape: iter(stack) for shape, stack in self._stacks.items()}
        tensors = [next(views[shape]) for shape in wanted]
        self.keys, self.values = tensors[: len(shapes)], tensors[len(shapes) :]

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` columns of the rows ``source`` into the rows ``target``; the two may overlap."""
        for stack in self._stacks.values():
            stack[:, target, :, :length] = stack[:, source, :, :length]


class _Window(Cache):
    """A cache as transformers sees it; subclasses decide where new keys go and which keys are attended."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        return 0


class ProbeWindow(_Window):
    """Stores nothing and records ``(heads, key size, value size)`` of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        known = len(self.shapes)
        require(layer_idx == known, "layer", layer_idx, f"{known}: layers that run in order, once each")
        self.shapes.append((key_states.shape[1], key_states.shape[3], value_states.shape[3]))
        return key_states, value_states


class PrefillWindow(_Window):
    """Prompts from position 0 on, written to the slots ``rows``; the prompt attends to itself."""

    def __init__(self, store: KVStore, rows: Tensor) -> None:
        super().__init__()
        self.store, self.rows = store, rows

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        length = key_states.shape[2]
        self.store.keys[layer_idx][self.rows, :, :length] = key_states
        self.store.values[layer_idx][self.rows, :, :length] = value_states
        return key_states, value_states


class DecodeWindow(_Window):
    """One token for each of the first slots, written at ``columns``; the first ``extent`` columns are attended."""

    def __init__(self, store: KVStore, rows: Tensor, columns: Tensor, extent: int) -> None:
        super().__init__()
        self.store, self.rows, self.columns, self.extent = store, rows, columns, extent

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        keys, values = self.store.keys[layer_idx], self.store.values[layer_idx]
        keys[self.rows, :, self.columns] = key_states[:, :, 0]
        values[self.rows, :, self.columns] = value_states[:, :, 0]
        count = len(self.rows)
        return keys[:count, :, : self.extent], values[:count, :, : self.extent]


class KernelWindow(_Window):
    """A ``DecodeWindow`` on a GPU: the attention kernel reads only the columns that a row has."""

    def __init__(self, store: KVStore, columns: Tensor) -> None:
        super().__init__()
        self.store, self.columns = store, columns

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        from goldilocks.engine import kernels  # needs Triton, which only comes with a CUDA build of torch

        keys, values = self.store.keys[layer_idx], self.store.values[layer_idx]
        kernels.write(key_states, value_states, keys, values, self.columns)
        return keys, values


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend ``query`` [rows, heads, tokens, size] over keys and values with as many or fewer heads."""
    for unsupported in ("softcap", "s_aux"):
        if kwargs.get(unsupported) is not None:
            raise ValueError(f"{unsupported}={kwargs[unsupported]!r} is not accepted: attention without it")
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        if query.shape[2] < key.shape[2]:
            from goldilocks.engine import kernels  # needs Triton, which only comes with a CUDA build of torch

            return kernels.attend(query, key, value, attention_mask, scaling or query.shape[3] ** -0.5), None
        attention_mask = None  # a prompt from position 0: plain causal attention
    elif attention_mask is not None and attention_mask.is_floating_point() and query.shape[2] == 1:
        return fold(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def fold(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """One token per row: the heads that share a key head become the queries of that head, so no key is repeated."""
    rows, heads, _, size = query.shape
    folded = query.reshape(rows, key.shape[1], -1, size)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[3])


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


AttentionInterface.register(NAME, slot_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


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
