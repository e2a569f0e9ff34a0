"""Tiny random models of every architecture that the engine is said to run, made when they are asked for."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from unit.engine.models import SHAPE, made

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": 40,
}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

Architecture = tuple[str, Mapping[str, Any]]

SUPPORTED: dict[str, Architecture] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "mistral": ("MistralConfig", {}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8}),
    "phi": ("PhiConfig", {}),  # half of a head is rotated, cut off before
    "phi3": ("Phi3Config", {}),
    "phi4_mini": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "phi3_longrope": ("Phi3Config", {"original_max_position_embeddings": 40, "rope_parameters": _LONG}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {}),
    "opt": ("OPTConfig", {"word_embed_proj_dim": 32, "ffn_dim": 48}),
    "gpt_neox": ("GPTNeoXConfig", {}),  # a quarter of a head is rotated
    "gpt_neox_whole": ("GPTNeoXConfig", {"rotary_pct": 1.0}),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.5}),
    "persimmon": ("PersimmonConfig", {}),
    "glm": ("GlmConfig", {"head_dim": 8}),
    "glm4": ("Glm4Config", {"head_dim": 8}),
    "granite": ("GraniteConfig", {}),
    "smollm3": ("SmolLM3Config", {}),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {}),
    "starcoder2": ("Starcoder2Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 8, "decoder_sparse_step": 1, **_EXPERTS}),
    "olmoe": ("OlmoeConfig", {**_EXPERTS}),
    "glm4_moe": ("Glm4MoeConfig", {"head_dim": 8, **_ROUTED}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
            **_ROUTED,
        },
    ),
}
EXPERTS = frozenset({"mixtral", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3"})

WINDOWED: dict[str, Architecture] = {
    "mistral": ("MistralConfig", {"sliding_window": 12}),
    "mixtral": ("MixtralConfig", {"sliding_window": 12, "num_local_experts": 4}),
    "phi3": ("Phi3Config", {"sliding_window": 12}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 12}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 0}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 12, "head_dim": 8}),
    "cohere2": ("Cohere2Config", {"sliding_window": 12}),
    "llama4": (
        "Llama4TextConfig",
        {"attention_chunk_size": 12, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    ),
}
"""Models that attend to twelve tokens at most in some or all layers."""


def config_of(architecture: Architecture, **keys: Any) -> PretrainedConfig:
    """The config; skips the test where this transformers has no such architecture."""
    name, own = architecture
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return kind(**{**SHAPE, **own, **keys})


@cache
def _made(name: str) -> PreTrainedModel:
    return made(config_of(SUPPORTED[name]))


def fresh(name: str) -> PreTrainedModel:
    """A copy of a supported model that a test may change."""
    return copy.deepcopy(_made(name))
