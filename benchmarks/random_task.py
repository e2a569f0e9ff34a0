"""A task that costs what a real one costs and needs no trained weights: a Qwen2-shaped model, prompts and a reward.

The weights are random. At every token the model ends its answer with the same chance, whatever it has written, so that
the lengths of the answers are known before: geometric with the mean that was asked for, cut at the longest. The reward
is drawn by prompt: of a share ``keep`` of the prompts an answer's reward is a hash of its text, and a group of eight is
mixed with a chance of 0.99; of the others it is the same for every answer. Neither length nor weights change which
groups teach something, so that all runs of a table have the same work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PAD, END, USER, ASSISTANT, NEWLINE = "<pad>", "<|im_end|>", "<user>", "<assistant>", "\n"
SPECIAL = [
    PAD,
    END,
    USER,
    ASSISTANT,
    NEWLINE,
]  # verl wants the end and the newline of a Qwen model to be one token each
PROMPTS, PROMPT_WORDS = 8_192, 32
LEVEL, QUIET = 4.0, 0.05

REWARD = """
import zlib

def drawn(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    acc = float(zlib.crc32(solution_str.encode()) & 1) if ground_truth == "mixed" else float(ground_truth)
    return {"score": acc, "acc": acc}
"""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    words: int


SHAPES = {
    "tiny": Shape(64, 128, 2, 2, 1, 1_024),
    "smollm2": Shape(576, 1_536, 30, 9, 3, 49_152),  # SmolLM2-135M
    "0.5b": Shape(896, 4_864, 24, 14, 2, 151_936),  # Qwen2.5
    "1.5b": Shape(1_536, 8_960, 28, 12, 2, 151_936),
    "3b": Shape(2_048, 11_008, 36, 16, 2, 151_936),
}


def make_model(folder: Path, shape: Shape, mean: int, longest: int, dtype: str, device: str = "cpu") -> None:
    """Write a model whose answers have this mean length, made on this device, and its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.words, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=longest + 2 * PROMPT_WORDS, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=SPECIAL.index(END), pad_token_id=SPECIAL.index(PAD), dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
        with torch.no_grad():
            end_by_chance(model, 1 / mean)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer(shape.words).save_pretrained(folder)


def end_by_chance(model: Any, chance: float) -> None:
    """Give every token but the end the same logit, and the end this chance after any text.

    The head sees the first dimension alone: the last norm's weight is 0 elsewhere. All words have the same value there,
    and the layers, whose outputs are scaled down, hardly change it. Only the end's value differs.
    """
    import torch

    body = model.model
    for layer in body.layers:
        layer.self_attn.o_proj.weight.mul_(QUIET)
        layer.mlp.down_proj.weight.mul_(QUIET)
    words = body.embed_tokens.weight
    words[:, 0] = LEVEL
    body.norm.weight.zero_()
    body.norm.weight[0] = 1
    ids = torch.randint(len(SPECIAL), len(words), (4, PROMPT_WORDS))
    body.norm.weight[0] = 1 / body(ids).last_hidden_state[..., 0].float().mean()
    words[SPECIAL.index(END), 0] = LEVEL + math.log(chance / (1 - chance) * (len(words) - 1))


def tokenizer(words: int) -> Any:
    """Return a tokenizer with one token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *(f"w{index}" for index in range(words - len(SPECIAL)))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(names)}, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, additional_special_tokens=[USER, ASSISTANT, NEWLINE]
    )
    made.chat_template = f"{{% for m in messages %}}{USER} {{{{ m['content'] }}}} {{% endfor %}}{ASSISTANT}"
    return made


def make_data(folder: Path, shape: Shape, keep: float) -> None:
    """Write prompts, of which a share ``keep`` has mixed rewards, and the reward function."""
    import pandas

    draws = np.random.default_rng(1)
    words = draws.integers(shape.words - len(SPECIAL), size=(PROMPTS, PROMPT_WORDS))
    golden = (math.sqrt(5) - 1) / 2  # its multiples are spread evenly, so that stretches of the prompts are alike
    mixed = np.arange(PROMPTS) * golden % 1 < keep  # a larger share has the same prompts and some more
    rows = [
        {
            "data_source": "drawn",
            "prompt": [{"role": "user", "content": " ".join(f"w{word}" for word in own)}],
            "reward_model": {"style": "rule", "ground_truth": "mixed" if mixed[index] else str(index % 2)},
            "extra_info": {"index": index},
        }
        for index, own in enumerate(words)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_parquet(folder / "data.parquet")
    (folder / "reward.py").write_text(REWARD)


def settings(model: Path, data: Path, longest: int) -> list[str]:
    """Return the settings of a run that uses them."""
    return [
        f"data.train_files={data}/data.parquet",
        f"data.val_files={data}/data.parquet",
        f"data.max_prompt_length={PROMPT_WORDS + 8}",
        f"data.max_response_length={longest}",
        f"actor_rollout_ref.model.path={model}",
        f"reward.custom_reward_function.path={data}/reward.py",
        "reward.custom_reward_function.name=drawn",
    ]
