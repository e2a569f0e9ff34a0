"""What an agent-loop worker spends on a rollout: verl's loop, one by one, beside ours, many at a time.

    python benchmarks/single_turn.py
    python benchmarks/single_turn.py --rollouts 512 --tokens 96

The worker is ours in this process, with verl's tokenizer path, agent loop, reward manager and rows. The rollout server
and the queue answer at once, so what is timed is the worker's own work. CPU time of the process, best of several.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
import traceback
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("GOLDILOCKS_PATCHES", "all")
os.environ.setdefault("VERL_PLATFORM", "cpu")

import transfer_queue
from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.config import RolloutConfig
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from goldilocks.rewards.calls import guarded
from goldilocks.tasks.tiny_model import character_tokenizer
from goldilocks.verl.dispatch import worker
from goldilocks.verl.dispatch.backend import FIRST, ROLLOUTS, VISIT_SEED
from goldilocks.verl.dispatch.single_turn import SingleTurn
from goldilocks.verl.dispatch.worker import StreamingWorker

N = 8  # rollouts of a prompt
TICK = 32  # rollouts that end together
TIMES = 5


class Server:
    """Every answer has the same tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._log_probs = [7] * (tokens - 1) + [1], [-1.0] * tokens
        self.generate = SimpleNamespace(remote=self._generate)
        self.generate_all = SimpleNamespace(remote=self._generate_all)
        self.more_answers = SimpleNamespace(remote=self._more_answers)
        self._left: list[str] = []

    async def _generate(self, **_: Any) -> TokenOutput:
        about = {"global_steps": 0, "top_log_probs": self._log_probs}
        return TokenOutput(
            token_ids=self._tokens, log_probs=self._log_probs, stop_reason="completed", extra_fields=about
        )

    async def _generate_all(self, batch: str, requests: list[Any]) -> list[Any]:
        self._left = [name for name, _, _ in requests]
        return await self._more_answers(batch)

    async def _more_answers(self, batch: str) -> list[Any]:
        await asyncio.sleep(0)
        names, self._left = self._left[:TICK], self._left[TICK:]
        return [(name, await self._generate(), None) for name in names]


class Balancer:
    """A load balancer of one server."""

    def __init__(self, server: Server) -> None:
        answers = {
            "get_all_servers": {"one": server},
            "acquire_server": ("one", server),
            "release_server": None,
            "require_acquire_fields": [],
            "require_release_fields": [],
        }
        for name, answer in answers.items():
            setattr(self, name, SimpleNamespace(remote=lambda *_, _answer_=answer, **__: _answer(_answer_)))


def _answer(value: Any) -> asyncio.Future[Any]:
    answer = asyncio.get_running_loop().create_future()
    answer.set_result(value)
    return answer


class Worker(StreamingWorker):
    """Our worker, with what verl's constructor reads from files and asks Ray for."""

    def __init__(self, tokens: int, whole: bool) -> None:
        rollout = {"name": "transformers", "max_num_seqs": 512, "prompt_length": 16, "response_length": tokens}
        reward = {
            "custom_reward_function": guarded({"path": "pkg://goldilocks.tasks.registry", "name": "compute_score"}),
            "reward_manager": {"name": "naive", "source": "register"},
            "reward_model": {"enable": False},
        }
        section = {"rollout": {**rollout, "full_determinism": False, "agent": {"num_workers": 1}}}
        self.config = OmegaConf.create({"actor_rollout_ref": section, "data": {}, "reward": reward})
        self.rollout_config = RolloutConfig(**rollout, calculate_log_probs=True)
        self.tokenizer, self.processor, self.hf_model_type = character_tokenizer(), None, "llama"
        self.model_config = SimpleNamespace(generation_config=None)
        self.dataset_cls, self.tools, self.mm_processor_kwargs = RLHFDataset, [], {}
        self.distillation_enabled, self.reward_loop_worker_handles = False, [None]
        self.background_tasks: set[Any] = set()
        self._listen(LLMServerClient(self.config, Balancer(Server(tokens))))
        self.single_turn = SingleTurn(self) if whole else None


async def take(**_: Any) -> None:
    """A put into a queue that takes everything at once."""


async def fail(error: BaseException) -> None:
    """A rollout that fails ends the benchmark."""
    traceback.print_exception(error)
    os._exit(1)


def prompt(index: int) -> dict[str, Any]:
    return {
        "raw_prompt": [{"role": "user", "content": f"{index % 100}+{index % 100}="}],
        "data_source": "goldilocks/arithmetic",
        "reward_model": {"style": "rule", "ground_truth": str(2 * (index % 100))},
        "extra_info": {"index": index},
        "index": index,
        "uid": f"g{index}",
        "global_steps": 1,
        ROLLOUTS: N,
        FIRST: 0,
        VISIT_SEED: index,
    }


async def seconds(whole: bool, rollouts: int, tokens: int) -> float:
    """CPU seconds of the quickest of several runs."""
    worker = Worker(tokens, whole)
    spent = []
    for place in range(TIMES):
        prompts = [prompt(place * rollouts + i) for i in range(rollouts // N)]
        started, told = time.process_time(), 0
        await worker.start(prompts)
        while told < rollouts:
            told += len(await worker.events())
        spent.append(time.process_time() - started)
    return min(spent)


async def both(rollouts: int, tokens: int) -> tuple[float, float]:
    """CPU seconds of verl's way, and of ours."""
    return await seconds(False, rollouts, tokens), await seconds(True, rollouts, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    args = parser.parse_args()
    transfer_queue.async_kv_batch_put = take
    worker.publish = fail
    one_by_one, batched = asyncio.run(both(args.rollouts, args.tokens))
    print(f"{args.rollouts} rollouts of {args.tokens} tokens, {N} a prompt; CPU of the worker, best of {TIMES} runs\n")
    print(f"{'':24}{'ms per rollout':>16}")
    for name, found in (("verl's loop, one by one", one_by_one), ("many at a time", batched)):
        print(f"{name:24}{1e3 * found / args.rollouts:>16.2f}")
    print(f"{'ratio':24}{one_by_one / batched:>15.1f}×")


if __name__ == "__main__":
    main()
