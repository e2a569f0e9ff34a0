"""A task of pictures: a random Qwen2-VL whose answers end by chance, and a reward that is a hash of the answer."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from endless import FIRM, never_ends
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from .words_task import write_task

ENDLESS = ["w3", "w5"]  # answers to prompts that end with one of these do not end by themselves
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SPECIAL = ["<pad>", "<|im_end|>", "<user>", "<assistant>", *VISION, "\n"]
PICTURE = "<|vision_start|> <|image_pad|> <|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}<assistant> <user>{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %} " + PICTURE + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
SIDE = 56  # pixels: four tokens of a picture


def make_task(folder: Path, mean: int, longest: int, prompts: int = 64) -> list[str]:
    """Write a model whose answers have about this mean length, prompts and a reward; return the settings for them."""
    make_model(folder / "model", mean, longest)
    rows = [{"content": f"<image> w{index % 4}", "images": [{"bytes": picture(index)}]} for index in range(prompts)]
    return write_task(folder, longest, rows)


def pixels(index: int) -> np.ndarray:
    """A picture of noise; each index has its own."""
    return np.random.default_rng(index).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def picture(index: int) -> bytes:
    """Return a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels(index)).save(file, format="PNG")
    return file.getvalue()


def make_model(folder: Path, mean: int, longest: int) -> None:
    """Write a model of as many tokens as answers are long, each about as likely as the end, and its processor."""
    words = [*SPECIAL, *(f"w{index}" for index in range(mean - len(SPECIAL)))]
    number = {word: index for index, word in enumerate(words)}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(words), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": longest + 32,
            "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        },
        vision_config={"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        tie_word_embeddings=False,
        vision_start_token_id=number["<|vision_start|>"],
        vision_end_token_id=number["<|vision_end|>"],
        image_token_id=number["<|image_pad|>"],
        video_token_id=number["<|video_pad|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config)
    never_ends(model, [number[word] for word in ENDLESS])
    never_says(model, [number[word] for word in VISION])
    model.save_pretrained(folder)
    backend = Tokenizer(models.WordLevel(number, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>", additional_special_tokens=SPECIAL[2:-1]
    )
    size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    Qwen2VLProcessor(
        Qwen2VLImageProcessor(size=size), tokenizer, Qwen2VLVideoProcessor(size=size), chat_template=TEMPLATE
    ).save_pretrained(folder)


def never_says(model: Qwen2VLForConditionalGeneration, ids: list[int]) -> None:
    """No answer has one of these tokens: the trainer takes a token of a picture for a part of one that was shown."""
    never_ends(model, [], place=1)
    with torch.no_grad():
        model.get_output_embeddings().weight[ids, 1] = FIRM
