"""Tokens per second of the rollout engine against ``model.generate`` or vLLM, and against what the machine can do.

    python benchmarks/rollout.py                  # CPU: answers of ragged lengths
    python benchmarks/rollout.py --device cuda    # one GPU, bf16, 30M and 0.5B shapes; also a batch to its end
    python benchmarks/rollout.py --peer vllm --model FOLDER      # beside vLLM, on the weights in a folder
    python benchmarks/rollout.py --device cuda --peer plain   # beside the engine without fused layers
    python benchmarks/rollout.py --device cuda --peer eager   # beside the engine that reads no prompts by graphs

Both sides have the same weights and prompts and draw at temperature 1. Without a folder the weights are random: no
speed here depends on their values, and every answer has the length the workload says it has. ``generate`` draws tokens
only; vLLM returns the sampled token's log-prob too, as verl asks it to (without it: ``--no-log-probs``); the engine
returns that and the largest. Either engine forgets the prompts of one run before the next. After a warm-up each figure
is the best of three runs; on a GPU, where ``generate`` takes up to a minute, it runs once. The limit is that of a
decode step which reads every weight and every cached key and value once at the copy bandwidth, or multiplies at the
matrix rate, whichever takes longer; both rates are measured here.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    StoppingCriteria,
    StoppingCriteriaList,
)

from goldilocks.engine import Engine, SamplingParams

_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}

SHAPES: dict[str, PretrainedConfig] = {
    "3M": LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=True, **_IDS,
    ),
    "30M": LlamaConfig(
        vocab_size=12288, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=True, **_IDS,
    ),
    "SmolLM2": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, **_IDS,
    ),
    "0.5B": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, **_IDS,
    ),
    "1.5B": Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, **_IDS,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Prompts of one length, answers of given lengths; ``batch`` rows at a time on either side."""

    name: str
    prompts: np.ndarray
    lengths: np.ndarray
    batch: int

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def longest(self) -> int:
        return int(self.prompts.shape[1] + self.lengths.max())


def uniform(count: int, prompt: int, answer: int) -> Workload:
    """Every prompt different, every answer equally long, all at once: no room for clever scheduling."""
    prompts = np.random.default_rng(0).integers(1, 2048, (count, prompt))
    return Workload(f"{count} × ({prompt} + {answer})", prompts, np.full(count, answer), count)


def ragged(groups: int, n: int, prompt: int, longest: int, batch: int) -> Workload:
    """What RL sees: n answers to each prompt, most short, some cut off at the limit."""
    rng = np.random.default_rng(0)
    prompts = np.repeat(rng.integers(1, 2048, (groups, prompt)), n, axis=0)
    lengths = np.clip(rng.lognormal(np.log(longest / 4), 0.8, groups * n), 4, longest).astype(int)
    return Workload(f"{groups} × n={n}, {prompt} + 4…{longest}", prompts, lengths, batch)


def geometric(groups: int, n: int, prompt: int, mean: int, batch: int) -> Workload:
    """A batch of a trainer: answers end by chance, so that for most of its steps nothing waits for a slot."""
    rng = np.random.default_rng(0)
    prompts = np.repeat(rng.integers(1, 2048, (groups, prompt)), n, axis=0)
    lengths = np.minimum(rng.geometric(1 / mean, groups * n), 8 * mean)
    return Workload(f"{groups} × n={n}, {prompt} + geometric {mean}", prompts, lengths, batch)


class _RowLengths(StoppingCriteria):
    """Ends each row at its own length, as an end-of-sequence token would."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return input_ids.shape[1] >= self.lengths


@torch.inference_mode()
def run_generate(model: PreTrainedModel, work: Workload) -> None:
    width = work.prompts.shape[1]
    for start in range(0, len(work.prompts), work.batch):
        ids = torch.from_numpy(work.prompts[start : start + work.batch]).to(model.device)
        lengths = torch.from_numpy(work.lengths[start : start + work.batch]).to(model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=int(lengths.max()),
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([_RowLengths(lengths + width)]),
        )
        assert out.shape[1] == width + int(lengths.max())


def time_generate(model: PreTrainedModel, works: Sequence[Workload]) -> list[float]:
    def time_one(work: Workload) -> float:
        run_generate(model, Workload("warm-up", work.prompts[: work.batch], np.full(work.batch, 4), work.batch))
        return seconds(lambda: run_generate(model, work), model.device, 1 if model.device.type == "cuda" else 3)

    return [time_one(work) for work in works]


def time_vllm(model: PreTrainedModel, works: Sequence[Workload], log_probs: bool = True) -> list[float]:
    """vLLM in its default set-up on a GPU, with the same rows at a time and memory for every one of them.

    One engine for all workloads: on a GPU it takes a minute to compile and to capture its graphs.
    """
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(
            folder, skip_tokenizer_init=True, dtype=str(model.dtype).removeprefix("torch."),
            max_num_seqs=max(work.batch for work in works), max_model_len=max(work.longest for work in works),
            gpu_memory_utilization=0.5, enforce_eager=model.device.type == "cpu",
        )  # fmt: skip
    # The first of four is a warm-up.
    found = [seconds(functools.partial(run_vllm, llm, work, log_probs), model.device, 4) for work in works]
    llm.llm_engine.engine_core.shutdown()
    return found


def run_vllm(llm: Any, work: Workload, log_probs: bool) -> None:
    from vllm import SamplingParams

    asked = 0 if log_probs else None
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts.tolist()]
    params = [
        SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=asked, detokenize=False)
        for length in work.lengths.tolist()
    ]
    llm.reset_prefix_cache()
    answers = llm.generate(prompts, params, use_tqdm=False)
    assert sum(len(answer.outputs[0].token_ids) for answer in answers) == work.tokens
    assert all((answer.outputs[0].logprobs is not None) == log_probs for answer in answers)


def time_without(name: str, value: object, model: PreTrainedModel, works: Sequence[Workload]) -> list[float]:
    """The engine with a setting of its graphs changed."""
    from goldilocks.engine import graphs

    before = getattr(graphs, name)
    setattr(graphs, name, value)
    try:
        return [time_engine(model, work) for work in works]
    finally:
        setattr(graphs, name, before)


SWITCHED = {"plain": ("FUSED_LAYERS", False), "eager": ("FEW_TOKENS", 0)}
PEERS = {"generate": time_generate, "vllm": time_vllm} | {
    peer: functools.partial(time_without, *setting) for peer, setting in SWITCHED.items()
}


def run_engine(engine: Engine, work: Workload) -> None:
    for i, (prompt, length) in enumerate(zip(work.prompts.tolist(), work.lengths.tolist(), strict=True)):
        engine.submit(str(i), prompt, SamplingParams(max_tokens=length, seed=i))
    count = 0
    while engine.busy:
        count += sum(len(generation.token_ids) for generation in engine.step())
    assert count == work.tokens, (count, work.tokens)


def seconds(run: Callable[[], None], device: torch.device, repeats: int) -> float:
    """The best of a few runs: the rest is other people's load."""

    def once() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return min(once() for _ in range(repeats))


@dataclass(frozen=True)
class Machine:
    """What the device does at best, measured."""

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Machine:
        on_gpu = device.type == "cuda"
        source = torch.ones(2**30 if on_gpu else 2**26, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        copy = seconds(lambda: [target.copy_(source) for _ in range(10)] and None, device, 3) / 10
        size = 8192 if on_gpu else 1024
        a, b = torch.randn(2, size, size, device=device).to(dtype)
        multiply = seconds(lambda: [a @ b for _ in range(10)] and None, device, 3) / 10
        return cls(2 * source.nbytes / copy, 2 * size**3 / multiply)

    def seconds(self, model: PreTrainedModel, work: Workload) -> float:
        """The least time for ``work``, its rows in full batches that never hold a finished row."""
        config = model.config
        weights = sum(p.numel() for p in model.parameters())
        size = next(model.parameters()).element_size()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * size
        width = work.prompts.shape[1]
        # A row of length n attends over width + 1 … width + n columns.
        columns = float((work.lengths * width + work.lengths * (work.lengths + 1) / 2).sum())
        steps = max(work.tokens / work.batch, work.lengths.max())
        moved = steps * weights * size + columns * per_token
        computed = 2 * weights * work.tokens + 4 * columns * config.num_hidden_layers * config.hidden_size
        return max(moved / self.bytes_per_s, computed / self.flops_per_s)


def load(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of a folder, or one of a shape with random weights."""
    torch.manual_seed(0)
    with device:
        if name in SHAPES:
            return AutoModelForCausalLM.from_config(copy.deepcopy(SHAPES[name]), dtype=dtype)
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)


def workloads(device: torch.device) -> list[Workload]:
    if device.type == "cuda":
        return [uniform(512, 32, 128), ragged(128, 8, 32, 256, 512), geometric(128, 8, 40, 200, 384)]
    return [ragged(12, 8, 16, 128, 32)]


def time_engine(model: PreTrainedModel, work: Workload) -> float:
    """The engine takes the model over."""
    device = model.device
    engine = Engine(model, slots=work.batch, max_length=work.longest, eos_ids=(), pad_id=0, device=device)
    run_engine(engine, work)

    def cold() -> None:
        engine.load_weights([], last=False)  # forgets the prompts of the run before
        run_engine(engine, work)

    return seconds(cold, device, 3)


def measure(work: Workload, slow: float, model: PreTrainedModel, machine: Machine) -> tuple[str, ...]:
    """A row of the table, but for the model's name; ``slow`` is what the peer took."""
    fast = time_engine(model, work)
    least = machine.seconds(model, work)
    speeds = [f"{work.tokens / took:,.0f}" for took in (slow, fast, least)]
    return work.name, speeds[0], speeds[1], f"{slow / fast:.2f}×", speeds[2], f"{least / fast:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: 3M on a CPU, 30M and 0.5B on a GPU")
    parser.add_argument("--model", metavar="FOLDER", nargs="+", help="models to load, in place of random shapes")
    parser.add_argument("--peer", choices=PEERS, default="generate", help="what to measure beside (default: generate)")
    parser.add_argument("--no-log-probs", action="store_true", help="vLLM returns tokens only")
    args = parser.parse_args()
    if args.no_log_probs and args.peer != "vllm":
        parser.error(f"--no-log-probs is for --peer vllm, not for --peer {args.peer}")
    peer = functools.partial(time_vllm, log_probs=False) if args.no_log_probs else PEERS[args.peer]
    device = torch.device(args.device)
    if args.peer in SWITCHED and device.type != "cuda":
        parser.error(f"--peer {args.peer} needs --device cuda: on a CPU the engine has no fused layers and no graphs")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    machine = Machine.measure(device, dtype)
    print(
        f"copy {machine.bytes_per_s / 1e9:,.0f} GB/s, matrix product {machine.flops_per_s / 1e12:,.2f} TFLOP/s, {dtype}"
    )
    table = Table("model", "sequences", f"{args.peer} tok/s", "engine tok/s", "ratio", "limit tok/s", "of limit")
    for column in table.columns[2:]:
        column.justify = "right"
    works = workloads(device)
    for name in args.model or args.shapes or (["30M", "0.5B"] if device.type == "cuda" else ["3M"]):
        for work, slow in zip(works, peer(load(name, dtype, device), works), strict=True):
            row = measure(work, slow, load(name, dtype, device), machine)
            print(f"{Path(name).name}, {row[0]}: {args.peer} {row[1]} tok/s, engine {row[2]}", file=sys.stderr)
            table.add_row(Path(name).name, *row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
