"""A model's forward pass in fewer GPU kernels, rounding where transformers rounds.

``Fused`` runs a model of plain layers in half the kernels: eight to a layer of a decode step, where its modules launch
17. The projections to queries, keys and values become one matrix product, and so do gate and up. Their weights are laid
side by side, and the model's parameters become views of the result: new weights still arrive in place, and nothing is
held twice. Between the products stand the kernels of ``goldilocks.engine.kernels``.

Any other model runs by its own modules.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from goldilocks.engine.decoder import SLOT_ATTENTION, DecodeWindow, KVStore

logger = logging.getLogger(__name__)

# Models whose layers are known to be attention and a gated MLP, each after a norm. ``agrees`` makes sure of it.
MODELS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


class Joined(NamedTuple):
    """Linear layers side by side."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight, self.bias)


@torch.no_grad()
def join(*linears: nn.Linear) -> Joined:
    """Lay linear layers side by side; their own parameters become views of the result."""
    weight = _side_by_side([one.weight for one in linears])
    biases = [one.bias for one in linears if one.bias is not None]
    return Joined(weight, _side_by_side(biases) if biases else None)


def _side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    whole = torch.cat([one.data for one in parameters])
    for one, view in zip(parameters, whole.split([len(one) for one in parameters]), strict=True):
        one.data = view
    return whole


class _Layer(NamedTuple):
    """What a step needs of a layer."""

    qkv: Joined
    heads: Any  # kernels.Heads
    norms: tuple[Any, Any] | None  # of queries and keys, where the model has them
    attended: nn.Module
    after_attention: Any
    gate_and_up: Joined
    down: nn.Module
    after_mlp: Any  # the next layer's first norm, or the model's last


class Fused:
    """Prompts and single tokens through a model that ``fits``."""

    def __init__(self, model: Any, length: int) -> None:
        from goldilocks.engine import kernels  # needs Triton, which only comes with a CUDA build of torch

        self._kernels = kernels
        self._body, self._head = model.model, model.lm_head
        layers = [*self._body.layers]
        afters = [*(layer.input_layernorm for layer in layers[1:]), self._body.norm]
        self._layers = []
        for layer, after in zip(layers, afters, strict=True):
            own, mlp = layer.self_attn, layer.mlp
            norms = (own.q_norm, own.k_norm) if hasattr(own, "q_norm") else None
            weights = None if norms is None else (norms[0].weight, norms[1].weight)
            eps = 0.0 if norms is None else norms[0].variance_epsilon
            one = _Layer(
                qkv=join(own.q_proj, own.k_proj, own.v_proj),
                heads=kernels.Heads(model.config.num_attention_heads, own.scaling, weights, eps),
                norms=norms,
                attended=own.o_proj,
                after_attention=layer.post_attention_layernorm,
                gate_and_up=join(mlp.gate_proj, mlp.up_proj),
                down=mlp.down_proj,
                after_mlp=after,
            )
            self._layers.append(one)
        kind = torch.zeros((), dtype=model.dtype, device=model.device)
        with torch.no_grad():
            angles = self._body.rotary_emb(kind, torch.arange(length, device=model.device)[None])
        self._angles = angles[0][0].contiguous(), angles[1][0].contiguous()

    def step(self, tokens: Tensor, columns: Tensor, store: KVStore) -> Tensor:
        """Feed one token per row at its column of the cache. Returns the logits."""
        residual, states = self._begin(tokens)
        for layer, keys, values in zip(self._layers, store.keys, store.values, strict=True):
            projected = layer.qkv(states)
            seen = self._kernels.attend_layer(projected, self._angles, keys, values, columns, layer.heads)
            states = self._finish(layer, seen, residual)
        logits: Tensor = self._head(states)
        return logits

    def fill(self, tokens: Tensor, rows: Tensor, store: KVStore) -> None:
        """Write the keys and values of prompts ``tokens`` [prompts, width] to the ``rows`` of the cache."""
        width = tokens.shape[1]
        residual, states = self._begin(tokens.flatten())
        for layer, keys, values in zip(self._layers, store.keys, store.values, strict=True):
            query, key, value = self._rotated(layer, states.view(*tokens.shape, -1), keys.shape[3])
            keys[rows, :, :width] = key
            values[rows, :, :width] = value
            if layer is not self._layers[-1]:  # nothing comes after the last layer's keys
                seen = F.scaled_dot_product_attention(
                    query, key, value, is_causal=True, scale=layer.heads.scaling, enable_gqa=True
                )
                states = self._finish(layer, seen.transpose(1, 2).flatten(2).flatten(0, 1), residual)

    def _begin(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        residual = self._body.embed_tokens(tokens)
        return residual, self._body.layers[0].input_layernorm(residual)

    def _finish(self, layer: _Layer, seen: Tensor, residual: Tensor) -> Tensor:
        """The rest of a layer after attention, up to the norm that follows it; ``residual`` is advanced in place."""
        states = self._sum(layer.attended(seen), residual, layer.after_attention)
        states = layer.down(self._kernels.swiglu(layer.gate_and_up(states)))
        return self._sum(states, residual, layer.after_mlp)

    def _sum(self, delta: Tensor, residual: Tensor, norm: Any) -> Tensor:
        return self._kernels.add_norm(delta, residual, norm.weight, norm.variance_epsilon)

    def _rotated(self, layer: _Layer, states: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of prompts, [prompts, heads, width, size] each."""
        heads = layer.qkv(states).unflatten(-1, (-1, size))
        count = layer.heads.queries
        shared = (heads.shape[2] - count) // 2
        query, key, value = heads.split([count, shared, shared], 2)
        if layer.norms is not None:
            query, key = layer.norms[0](query), layer.norms[1](key)
        cosines, sines = (table[: states.shape[1], None] for table in self._angles)  # the same for all heads
        query, key = (_turned(one, cosines, sines) for one in (query, key))
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _turned(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding, rounded as transformers rounds it."""
    first, second = states.chunk(2, -1)
    return states * cosines + torch.cat([-second, first], -1) * sines


def fits(model: Any) -> bool:
    """Whether ``Fused`` computes what the model does: by its kind and by a comparison.

    By its kind: every weight is one that ``Fused`` reads, in layers of the ordinary kind, all of one type.
    """
    config = model.config
    if type(model).__name__ not in MODELS or config.hidden_act not in ("silu", "swish"):
        return False
    linears = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    found = [module for name, module in model.named_modules() if name.split(".")[-1] in linears]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    types = {parameter.dtype for parameter in model.parameters()}
    if size % 2 or types != {model.dtype} or any(type(one) is not nn.Linear for one in found):
        return False
    try:
        return agrees(model)
    except Exception as error:  # kernels that this GPU or this Triton cannot compile
        logger.warning("the layers of %s are not fused: %s", type(model).__name__, error)
        return False


@torch.inference_mode()
def agrees(model: Any) -> bool:
    """Whether one layer of the model's sizes, with weights drawn at random, gives the logits of its own modules."""
    rows, length = 8, 40
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 64, None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with torch.random.fork_rng(), model.device:
        drawn = type(model)._from_config(config, attn_implementation=SLOT_ATTENTION, dtype=model.dtype).eval()
    size = drawn.model.layers[0].self_attn.head_dim
    store = KVStore([(drawn.config.num_key_value_heads, size, size)], rows, length, model.dtype, model.device)
    for seed, tensor in enumerate([*drawn.parameters(), *store.keys, *store.values]):
        generator = torch.Generator(tensor.device).manual_seed(seed)
        # Divided so that the states of the model stay near one.
        tensor.normal_(generator=generator).div_(tensor.shape[-1] ** 0.5 if tensor.ndim == 2 else 1.0)
    row = torch.arange(rows, device=model.device)
    columns = row * 5
    hidden = torch.arange(length, device=model.device) > columns[:, None, None, None]
    theirs = drawn(
        input_ids=columns[:, None],
        position_ids=columns[:, None],
        attention_mask=hidden.to(model.dtype).masked_fill(hidden, -torch.inf),
        past_key_values=DecodeWindow(store, row, columns, length),
        use_cache=True,
    ).logits[:, -1]
    ours = Fused(drawn, length).step(columns, columns, store)
    rounding = max(4 * torch.finfo(model.dtype).eps, 1e-4)
    return bool((ours.float() - theirs.float()).norm() < rounding * theirs.float().norm())


def settle_rotary(model: nn.Module) -> None:
    """Fix the frequencies of embeddings that choose them by the longest row of each call.

    The choice waits for the device, which the capture of a graph cannot. It is always the same below the length that
    the model was first trained for, and an engine goes no further.
    """

    def settled(kind: str) -> str:
        return "default" if kind == "longrope" or "dynamic" in kind else kind

    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = settled(kind)  # type: ignore[assignment]
        elif isinstance(kind, dict):  # by the kind of layer
            module.rope_type = {layer: settled(name) for layer, name in kind.items()}  # type: ignore[assignment]
