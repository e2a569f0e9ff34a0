"""TRL with images in the data: a tiny random LLaVA, with our sections, its carried rows over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image

pytest.importorskip("trl")

import trl_world as world
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2Config,
)

from goldilocks.tasks.tiny_model import ASSISTANT, END, USER, character_tokenizer
from goldilocks.trl import GoldilocksRLOOTrainer

IMAGE = "<image>"
SIZE, PATCH = 8, 4
TEMPLATE = (
    "{% for message in messages %}" + USER + "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def processor() -> Any:
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [USER, ASSISTANT, IMAGE]})
    size = {"height": SIZE, "width": SIZE}
    pictures = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=size)
    return LlavaProcessor(
        pictures,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )


def model(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    end, pad = tokenizer.convert_tokens_to_ids(END), tokenizer.pad_token_id
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**small, image_size=SIZE, patch_size=PATCH, projection_dim=16),
        text_config=Qwen2Config(
            **small, num_key_value_heads=1, vocab_size=len(tokenizer), eos_token_id=end, pad_token_id=pad
        ),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
    )
    return LlavaForConditionalGeneration(config)


def dataset(size: int = 12) -> Dataset:
    """Return questions that have the same words and differ in their pictures; the second half has two of them."""
    colors = [Image.new("RGB", (SIZE, SIZE), (20 * one, 255 - 20 * one, 90)) for one in range(size)]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": "1+1="}],
                "images": [picture] if place < size // 2 else [picture, colors[0]],
                "right": 1 + place % 6,
            }
            for place, picture in enumerate(colors)
        ]
    )


def run(out: Path, sections: Any = None, **chosen: Any) -> Any:
    made = processor()
    options = {"processing_class": made, "model": model(made.tokenizer), "data": dataset(), **chosen}
    return world.run(out, sections, **options)


def test_with_everything_off_it_trains_what_trl_trains(tmp_path: Path) -> None:
    theirs = run(tmp_path / "theirs", ours=False, max_steps=2)
    world.assert_same_training(run(tmp_path / "ours", {"goldilocks": {}}, max_steps=2), theirs)


def test_carried_rows_keep_their_images_over_a_restart(tmp_path: Path) -> None:
    """A checkpoint falls between two updates on one batch."""
    sizes = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 6}
    chosen = {**sizes, "reward_funcs": world.every_third}
    whole = run(tmp_path, world.CARRYING, save_strategy="steps", save_steps=3, **chosen)
    assert max(record.get("train/age_max", 0) for record in whole.state.log_history) > 0
    rows = [row for _, row in whole.collection.rows.items()]
    assert {int(row.tensors["num_images"]) for row in rows} == {1, 2}
    assert rows[0].prompt[0]["content"].startswith("<image>")
    again = run(tmp_path, world.CARRYING, resume=str(tmp_path / "checkpoint-3"), **chosen)
    assert world.losses(again) == pytest.approx(world.losses(whole), rel=1e-3, abs=1e-6)


def test_rloo_trains_on_images(tmp_path: Path) -> None:
    trainer = run(tmp_path, world.CARRYING, ours=GoldilocksRLOOTrainer, beta=0.0, max_steps=2)
    assert any(world.losses(trainer))


def test_the_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="engine_slots=4 is not accepted: none with a model that sees images"):
        run(tmp_path, {"engine_slots": 4})
