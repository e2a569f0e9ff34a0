"""A task of words: a random Llama whose answers end by chance, and a reward that is a hash of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
# The words of a question in the other order: its first one stands last, and decides whether the answers end.
QUESTION = "{{ m['content'].split() | reverse | join(' ') }}"
TEMPLATE = f"{{% for m in messages %}}<assistant> <user> {QUESTION}{{% endfor %}}"
QUESTIONS = [f"w{index % 20} w{index // 20}" for index in range(400)]
REWARD = """
import zlib

def by_hash(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    acc = float(zlib.crc32(solution_str.encode()) & 1)
    return {"score": acc, "acc": acc}
"""


def make_task(folder: Path, mean: int, longest: int) -> list[str]:
    """Write a model whose answers have about this mean length, prompts and a reward; return the settings for them."""
    make_model(folder / "model", mean, longest)
    return write_task(folder, longest, [{"content": question} for question in QUESTIONS])


def write_task(folder: Path, longest: int, prompts: list[dict[str, Any]]) -> list[str]:
    """Write prompts, each with its ``content`` and other columns, and a reward; return the settings for them."""
    rows = [
        {
            "data_source": "hash",
            "prompt": [{"role": "user", "content": prompt.pop("content")}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
            **prompt,
        }
        for index, prompt in enumerate(prompts)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "data.parquet")
    (folder / "reward.py").write_text(REWARD)
    return [
        f"data.train_files={folder}/data.parquet",
        f"data.val_files={folder}/data.parquet",
        "data.max_prompt_length=16",
        f"data.max_response_length={longest}",
        f"actor_rollout_ref.model.path={folder}/model",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.custom_reward_function.name=by_hash",
    ]


def make_model(folder: Path, mean: int, longest: int) -> None:
    """Write a model of as many tokens as answers are long, each about as likely as the end, and its tokenizer."""
    words = [*SPECIAL, *(f"w{index}" for index in range(mean - len(SPECIAL)))]
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=longest + 32, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=SPECIAL[2:]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
