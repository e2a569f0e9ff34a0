"""The policy's own hidden states as features of the prompts: computed once for a data set, and kept in the cache.

They are of the policy that the run starts from. A Ray task computes them before verl places its workers, with a GPU of
its own where the run has one: the memory is free again when the workers come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig

from goldilocks.runs.atomic import replacing
from goldilocks.runs.directory import cache_folder
from goldilocks.verl.source import DatasetSource

ROWS = 64  # prompts at a time


def hidden_states(config: DictConfig, source: DatasetSource) -> np.ndarray:
    """A row for each prompt: the mean of the last layer over its tokens, and the last token's."""
    model = str(config.actor_rollout_ref.model.path)
    file = cache_folder() / "hidden_states" / f"{_name(model, source.keys())}.npy"
    if not file.exists():
        gpu = config.trainer.device == "cuda"
        task = ray.remote(num_gpus=int(gpu), max_calls=1)(compute)
        states = ray.get(task.remote(model, source.messages(), "cuda" if gpu else "cpu", config.data.max_prompt_length))
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary, temporary.open("wb") as opened:
            np.save(opened, states, allow_pickle=False)
    return np.asarray(np.load(file, allow_pickle=False))


def compute(model: str, prompts: Sequence[Any], device: str, longest: int) -> np.ndarray:
    """Run the model over the prompts, those of similar length together."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    network = AutoModel.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    rows = [prompt_tokens(tokenizer, messages)[-longest:] for messages in prompts]
    order = np.argsort([len(row) for row in rows], kind="stable")
    states = np.empty((len(rows), 2 * network.config.hidden_size), dtype=np.float32)
    with torch.inference_mode():
        for start in range(0, len(order), ROWS):
            chosen = order[start : start + ROWS]
            states[chosen] = _of_batch(network, [rows[place] for place in chosen], device)
    return states


def _of_batch(network: Any, rows: Sequence[Sequence[int]], device: str) -> np.ndarray:
    lengths = torch.tensor([len(row) for row in rows], device=device)
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long, device=device)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row, device=device)
    mask = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
    last_layer = network(tokens, attention_mask=mask.long()).last_hidden_state.float()
    mean = (last_layer * mask[..., None]).sum(1) / lengths[:, None]
    return np.asarray(torch.cat([mean, last_layer[torch.arange(len(rows)), lengths - 1]], dim=1).cpu())


def prompt_tokens(tokenizer: Any, messages: Any) -> list[int]:
    """Return the tokens of a prompt by the model's chat template, or of a plain text."""
    if isinstance(messages, str):
        return list(tokenizer(messages)["input_ids"])
    chat = [{"role": message["role"], "content": message["content"]} for message in messages]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _name(model: str, keys: np.ndarray) -> str:
    """Another model under the same path, or other data, has another name."""
    folder = Path(model).expanduser()
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    about = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.blake2b(repr((model, about)).encode(), digest_size=12)
    digest.update(np.ascontiguousarray(keys).tobytes())
    return digest.hexdigest()
