"""A model that sees images, trained by verl on vLLM: partial rollouts and the batch filter, over a kill.

Each row of the first checkpoint is looked at again with the weights that wrote it: with its own picture transformers
gives the log-probs that vLLM gave, and with another one it does not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("qwen_vl_utils")

from transformers import AutoModelForImageTextToText

from goldilocks.verl.store import load_rows

from .conftest import Train, kill_after_a_step, steps
from .pictures_task import make_task, pixels

pytestmark = [pytest.mark.integration, pytest.mark.runs(2), pytest.mark.timeout(2400)]

MEAN, LONGEST = 64, 2048  # tokens of an answer that ends by itself, and of one that does not


def test_images_are_carried_paused_and_saved_with_their_rows(train: Train, tmp_path: Path) -> None:
    words = (
        *("dapo", *make_task(tmp_path, MEAN, LONGEST), "trainer.save_freq=1", "goldilocks.on_stale_weights=error"),
        *("algorithm.filter_groups.metric=acc", "algorithm.filter_groups.on_full=partial"),
        *("algorithm.filter_groups.max_carry_steps=8", "batch_filter.enable=true"),
        # Of eight groups that are written at once two are a batch, and two have endless answers.
        *("actor_rollout_ref.rollout.n=4", "data.train_batch_size=2", "data.gen_batch_size=8", "data.shuffle=false"),
        *("actor_rollout_ref.rollout.max_num_seqs=64", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
        *("trainer.val_before_train=true", "data.val_max_samples=2", f"trainer.rollout_data_dir={tmp_path}/dumps"),
    )
    saved = kill_after_a_step(train(*words, "trainer.total_training_steps=1000"), tmp_path / "test")
    process = train(*words, f"trainer.total_training_steps={saved + 1}")
    _, err = process.communicate()
    assert process.returncode == 0, err

    step = steps(tmp_path / "test")[saved + 1]
    assert step["train/informative_groups"] == 2
    assert step["train/rollouts_paused"] > 0
    assert step.get("rollout/weights_gap", 0.0) < 1e-4  # of rows of this very policy, if there are any

    checkpoint = tmp_path / "test" / "checkpoints" / "global_step_1"
    (unfinished,) = checkpoint.rglob("unfinished")
    assert any(answers for _, _, answers in load_rows(unfinished))
    check_rows(
        [row for _, tag, row in load_rows(unfinished.parent) if tag["max_global_steps"] == 0], tmp_path / "model"
    )
    check_dumps(tmp_path / "dumps")


def check_rows(rows: list[dict[str, Any]], model: Path) -> None:
    policy = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    assert rows
    for row in rows:
        (seen,) = (part["image"] for part in row["raw_prompt"][0]["content"] if part["type"] == "image")
        assert np.array_equal(np.asarray(seen), pixels(row["index"]))
        own = row["multi_modal_inputs"]
        other = {**own, "pixel_values": own["pixel_values"].flip(0)}
        right, wrong = ((log_probs(policy, row, one) - row["rollout_log_probs"]).abs().max() for one in (own, other))
        assert right < 1e-4 < wrong


def log_probs(policy: Any, row: dict[str, Any], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The log-prob of each token of the answer, by transformers."""
    ids, answer = row["input_ids"], row["responses"]
    kinds = (ids == policy.config.image_token_id).long()
    seen = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    with torch.no_grad():
        logits = policy(ids[None], mm_token_type_ids=kinds[None], **seen).logits[0, len(row["prompts"]) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0]


def check_dumps(folder: Path) -> None:
    """Of an image its place is left."""
    lines = [json.loads(line) for file in folder.iterdir() for line in file.read_text().splitlines()]
    assert lines
    assert all(len(json.dumps(line)) < 40 * LONGEST for line in lines)
    assert not any(word in json.dumps(line) for line in lines for word in ("PIL.", "pixel_values", "PNG"))
