"""A tokenizer made from scratch: one token a character, and a chat template of two tokens."""

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
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, END, USER, ASSISTANT, UNKNOWN]
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
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
