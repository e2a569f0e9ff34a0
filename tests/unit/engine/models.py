"""Tiny random models, one per architecture the engine is tested with, made once."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from goldilocks.engine import Engine, Generation

VOCABULARY = 61

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.1,  # sharp enough to show a wrong mask; at 0.3 plain fp32 is itself 2e-5 off fp64
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None,
        initializer_range=0.1,
    ),
}  # fmt: skip


def made(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model with the same random weights each time."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@cache
def _made(name: str) -> PreTrainedModel:
    return made(CONFIGS[name])


def reference(name: str) -> PreTrainedModel:
    """The model as transformers runs it; shared, not to be changed."""
    return _made(name)


def fresh(name: str) -> PreTrainedModel:
    """A copy an engine may own."""
    return copy.deepcopy(_made(name))


def drain(engine: Engine) -> dict[str, Generation]:
    """Step until no request is left; return what came back, by its name."""
    done: dict[str, Generation] = {}
    while engine.busy:
        for generation in engine.step():
            assert generation.request_id not in done
            done[generation.request_id] = generation
    return done


@torch.inference_mode()
def log_probs(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The log-probs of the answer's tokens by one full forward pass."""
    ids = torch.tensor([prompt + answer], device=model.device)
    logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


def differences(theirs: PreTrainedModel, found: Iterable[tuple[list[int], Generation]]) -> torch.Tensor:
    """How far the log-prob of each token that was sampled after a prompt is from that of ``theirs``."""
    return torch.cat([(log_probs(theirs, p, g.token_ids) - torch.tensor(g.log_probs)).abs() for p, g in found])


@torch.inference_mode()
def logits_after(name: str, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The logits each token of ``answer`` was drawn from, by one full forward pass."""
    ids = torch.tensor([prompt + answer])
    return reference(name)(ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1].float()
