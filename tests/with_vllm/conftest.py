"""``goldilocks train … rollout.name=vllm`` for real, on a machine without a GPU; ``make test-vllm`` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from goldilocks.launch.supervisor import processes_of
from goldilocks.tasks.tiny_model import build, character_tokenizer

SMALL = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.max_num_seqs=8",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
)

Train = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """``train(*words)`` starts the command; its run is ``tmp_path/test``."""

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "goldilocks.cli", "train", "--runs", str(tmp_path), "--name", "test"]
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen([*command, *SMALL, *words], env=env, text=True, stderr=subprocess.PIPE)

    return start


def make_model(folder: Path, length: int) -> Path:
    """Make an untaught model of texts of this length: what a test aborts must not end before the abort comes."""
    tokenizer = character_tokenizer()
    model = build(tokenizer, seed=0)
    model.config.max_position_embeddings = length
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def steps(run: Path) -> dict[int, dict[str, float]]:
    """What the run has logged so far, by step."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {record["step"]: record["data"] for record in map(json.loads, lines) if record["step"] > 0}


def log_probs(policy: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The log-prob of each token of the answer, by transformers."""
    ids = torch.tensor([*prompt, *answer])
    with torch.no_grad():
        logits = policy(ids[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None])[:, 0]


def kill_after_a_step(process: subprocess.Popen[str], run: Path) -> int:
    """Kill the command once its run has a checkpoint; return the last one's step when nothing of the run is left."""
    latest = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    while not latest.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.5)
    process.kill()
    process.communicate()
    while any(processes_of(run.resolve())):
        time.sleep(0.5)
    return int(latest.read_text())
