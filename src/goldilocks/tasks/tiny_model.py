"""Tiny Qwen2-style models of 85 thousand parameters, to train without a download: ready-made ones, and building one.

The ready-made models, one for each task of ``TINY``, are files beside this module. ``scripts/make_tiny_models.py`` made
them: it taught them their task by lessons that leave them imperfect, so that RL has something to teach.

A tokenizer has a token per character and a chat template of two tokens. It is a byte-level BPE without merges, since
transformers loads the tokenizer of a Qwen2 model as a byte-level BPE.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from goldilocks.errors import require_known

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

TINY = ("arithmetic", "ladder", "calculator")
TINY_MODELS = {f"tiny-{task}": str(Path(__file__).parent / "tiny_models" / task) for task in TINY}  # their folders
ARITHMETIC = "0123456789+-*= \n"  # verl wants the newline of a Qwen model to be one token
PAD, END, USER, ASSISTANT, UNKNOWN = "<|pad|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|unknown|>"

_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}" + END + "{% else %}"
    "" + USER + "{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def tiny_model(task: str) -> Path:
    """Return the folder of the task's ready-made model, as transformers loads it."""
    require_known("task", task, TINY)
    return Path(TINY_MODELS[f"tiny-{task}"])


def character_tokenizer(characters: Iterable[str] = ARITHMETIC) -> PreTrainedTokenizerFast:
    """Return a transformers tokenizer over these characters; anything else becomes the unknown token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, END, USER, ASSISTANT, UNKNOWN]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = [by_bytes.pre_tokenize_str(character)[0][0] for character in characters]
    vocabulary = {token: index for index, token in enumerate([*special, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.pre_tokenizer = by_bytes
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def build(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Return the untrained model of 85 thousand parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        # Heads of 32: the smallest that every engine's attention has.
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        # The usual 0.02 is for a width of thousands: here hundreds of steps would pass before the loss falls.
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)
