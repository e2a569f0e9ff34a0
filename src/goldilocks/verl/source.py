"""verl's training data as a source of prompts: keys, messages, the order of the data loader, and hidden states.

The hidden states are features of the prompts, by the policy that the run starts from, computed once for a data set and
kept in the cache. A Ray task computes them before verl places its workers, with a GPU of its own where the run has one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from torch.utils.data import SequentialSampler

from goldilocks.core.source import TablePrompts
from goldilocks.hashing import MEDIA
from goldilocks.runs.files import cache_folder, write_array


class DatasetSource(TablePrompts):
    """The prompts of verl's data set."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.table = getattr(dataset, "dataframe", None)
        super().__init__(len(dataset))

    def messages(self) -> Iterable[Any]:
        """The chat messages of each prompt, without building training rows if the data set allows it."""
        key = getattr(self.dataset, "prompt_key", None)
        if self.table is not None and key is not None:
            messages: Iterable[Any] = self.table[key]
            return messages
        return (self.dataset[index]["raw_prompt"] for index in range(len(self.dataset)))

    def media(self) -> Sequence[str]:
        if getattr(self.dataset, "prompt_key", None) is None:
            return ()  # the messages are whole
        names = (getattr(self.dataset, key, None) for key in MEDIA)
        return [str(name) for name in names if name in getattr(self.table, "column_names", ())]


def loader_order(sampler: Any) -> Callable[[int], np.ndarray]:
    """Return a function from the epoch to the order in which a data loader with this sampler visits the data.

    The order of any epoch must be known without going through the epochs before it: only samplers that depend on
    nothing but their seed are accepted.
    """
    from torchdata.stateful_dataloader.sampler import RandomSampler

    size = len(sampler)
    if isinstance(sampler, SequentialSampler):
        return lambda epoch: np.arange(size)
    if not (type(sampler) is RandomSampler and not sampler.replacement and size == len(sampler.data_source)):
        raise ValueError(
            f"train_sampler={type(sampler).__name__} is not accepted: a SequentialSampler, or torchdata's "
            "RandomSampler over all data. To choose prompts, write a selector (goldilocks.selector)"
        )
    state = sampler.generator.get_state()

    def order(epoch: int) -> np.ndarray:
        generator = torch.Generator()
        generator.set_state(state)
        for _ in range(epoch):
            torch.randperm(size, generator=generator)
        return torch.randperm(size, generator=generator).numpy()

    return order


ROWS = 64  # prompts at a time


def hidden_states(config: DictConfig, source: DatasetSource) -> np.ndarray:
    """A row for each prompt: the mean of the last layer over its tokens, and the last token's."""
    model = str(config.actor_rollout_ref.model.path)
    dtype = config.actor_rollout_ref.rollout.dtype
    file = cache_folder() / "hidden_states" / f"{_name(model, dtype, source.keys())}.npy"
    if not file.exists():
        gpu = config.trainer.device == "cuda"
        task = ray.remote(num_gpus=int(gpu), max_calls=1)(compute)
        device, longest = "cuda" if gpu else "cpu", config.data.max_prompt_length
        states = ray.get(task.remote(model, list(source.messages()), device, longest, dtype))
        write_array(file, states)
    return np.asarray(np.load(file, allow_pickle=False))


def compute(model: str, prompts: Sequence[Any], device: str, longest: int, dtype: str) -> np.ndarray:
    """Run the model over the prompts in the precision of the rollouts, those of similar length together."""
    from transformers import AutoModel, AutoTokenizer
    from verl.utils.torch_dtypes import PrecisionType

    tokenizer = AutoTokenizer.from_pretrained(model)
    precision: Any = PrecisionType
    options = {"dtype": precision.to_dtype(dtype), "attn_implementation": "sdpa"}
    network = AutoModel.from_pretrained(model, **options).to(device).eval()
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


def _name(model: str, dtype: str, keys: np.ndarray) -> str:
    """Another model under the same path, another precision, or other data has another name."""
    folder = Path(model).expanduser()
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    about = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.blake2b(repr((model, dtype, about)).encode(), digest_size=12)
    digest.update(np.ascontiguousarray(keys).tobytes())
    return digest.hexdigest()
