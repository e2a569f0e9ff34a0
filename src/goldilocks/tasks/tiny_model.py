"""A tiny Qwen2-style model and its tokenizer, made from scratch, to train without a download.

The tokenizer has a token per character and a chat template of two tokens. It is a byte-level BPE without merges, since
transformers loads the tokenizer of a Qwen2 model as a byte-level BPE.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import Progress

from goldilocks.tasks import calculator, ladder
from goldilocks.tasks.registry import ASSISTANT, END, PAD, UNKNOWN, USER, Problem
from goldilocks.tasks.warm_start import STEPS, encode, lessons, warm_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM


ARITHMETIC = "0123456789+-*= \n"  # verl wants the newline of a Qwen model to be one token

_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}" + END + "{% else %}"
    "" + USER + "{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)

ANSWER_TOKENS = 16

# task: its tokenizer, and the lessons of its warm start
TASKS: Mapping[str, tuple[Callable[[], PreTrainedTokenizerFast], Callable[[random.Random], Iterator[Problem]]]] = {
    "arithmetic": (lambda: character_tokenizer(), lessons),
    "ladder": (
        lambda: character_tokenizer(ladder.CHARACTERS),
        functools.partial(ladder.lessons, fall=ladder.FALL_TINY),
    ),
    "calculator": (lambda: calling_tokenizer(), calculator.lessons),
}


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


def calling_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer for arithmetic with the two tokens of a call, and a template that has messages of tools."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([calculator.CALL, calculator.CLOSE])
    tokenizer.add_tokens([calculator.TOOL], special_tokens=True)
    said = "{% if message['role'] == 'tool' %}" + calculator.TOOL + "{{ message['content'] }}\n{% elif"
    tokenizer.chat_template = _TEMPLATE.replace("{% if", said, 1)
    return tokenizer


def make(
    out: Path, seed: int = 0, steps: int = STEPS, task: str = "arithmetic"
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Build the model, warm-start it under a progress bar, and save both to ``out`` as transformers does."""
    make_tokenizer, taught = TASKS[task]
    tokenizer = make_tokenizer()
    model = build(tokenizer, seed)
    with _few_threads(), Progress(transient=True) as bar:
        line = bar.add_task("warming up the tiny model", total=steps)
        once = functools.cache(functools.partial(encode, tokenizer))  # most lessons come more than once
        warm_start(model, once, seed, steps, lambda done: bar.update(line, completed=done), taught)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return model, tokenizer


def build(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Return the untrained model of 85 thousand parameters."""
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


@torch.no_grad()
def pass_rates(model: Any, tokenizer: Any, problems: list[Problem], samples: int) -> list[float]:
    """Return how often each problem is answered right, by sampling at temperature 1."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p.question}], add_generation_prompt=True, tokenize=False
        )
        for p in problems
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.random.fork_rng(devices=[]), _few_threads():
        torch.manual_seed(0)
        out = model.generate(
            **inputs, do_sample=True, top_k=0, max_new_tokens=ANSWER_TOKENS, num_return_sequences=samples
        )
    answers = out[:, inputs.input_ids.shape[1] :].view(len(problems), samples, -1)
    return [
        sum(_finished(row, tokenizer) == problem.answer for row in rows) / samples
        for problem, rows in zip(problems, answers, strict=True)
    ]


def _finished(tokens: torch.Tensor, tokenizer: Any) -> str | None:
    ids = tokens.tolist()
    return tokenizer.decode(ids[: ids.index(tokenizer.eos_token_id)]) if tokenizer.eos_token_id in ids else None


@contextlib.contextmanager
def _few_threads() -> Iterator[None]:
    """Use two threads at most: with tensors this small, more threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
