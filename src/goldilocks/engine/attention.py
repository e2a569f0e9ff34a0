"""The attention function the engine installs in a model, through transformers' own registry.

Called by the engine, the 4-D ``attention_mask`` carries one of two things: integers, the last key position each query
sees (prompts from position 0, and single tokens on a GPU); or floats, an additive mask over the attended columns
(single tokens on a CPU). Every other call is plain scaled-dot-product attention: ``model.generate`` works unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "goldilocks_slots"


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
def installed(model: PreTrainedModel) -> Iterator[Callable[[], int]]:
    """Install the attention function in ``model``; until the block ends its calls are counted."""
    calls = 0

    def counting(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        nonlocal calls
        calls += 1
        return slot_attention(*args, **kwargs)

    AttentionInterface.register(NAME + "_counting", counting)
    model.set_attn_implementation(NAME + "_counting")
    try:
        yield lambda: calls
    finally:
        model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, slot_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
