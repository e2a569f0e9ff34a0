"""A tokenizer made from scratch: one token per character, and a chat template of two tokens.

It is a byte-level BPE without merges, since transformers loads the tokenizer of a Qwen2 model as a byte-level BPE.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, USER, ASSISTANT, UNKNOWN = "<|pad|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|unknown|>"
ARITHMETIC = "0123456789+-*= \n"  # verl wants the newline of a Qwen model to be one token

_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}" + END + "{% else %}"
    "" + USER + "{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def character_tokenizer(characters: Iterable[str] = ARITHMETIC) -> PreTrainedTokenizerFast:
    """A transformers tokenizer over these characters; anything else becomes the unknown token."""
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
