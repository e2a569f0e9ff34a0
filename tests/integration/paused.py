"""Runs whose rollouts pause: a model whose answers have all lengths, half of them right, whatever they say."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .conftest import Task
from .killed import dumped_every_step

REWARD = """
import zlib

def by_hash(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    acc = float(zlib.crc32(solution_str.encode()) & 1)
    return {"score": acc, "acc": acc}
"""


def untaught(task: Task, folder: Path) -> Path:
    """A model that ends an answer with probability 1/32 at each token."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(task.model)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(task.model).save_pretrained(folder)
    return folder


def of_all_lengths(task: Task, folder: Path) -> list[str]:
    """The settings of a run whose answers have all lengths; it saves and dumps every step."""
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    return [
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "+algorithm.filter_groups.max_carry_steps=4",
        f"actor_rollout_ref.model.path={untaught(task, folder / 'model')}",
        "data.max_response_length=100",
        f"reward.custom_reward_function.path={reward}",
        "reward.custom_reward_function.name=by_hash",
        *dumped_every_step(folder),
    ]
