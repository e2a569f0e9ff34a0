"""Our worker with verl's own agent loop, reward manager and rows, over a server and a queue in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.config import RolloutConfig
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from goldilocks.engine.request import Generation
from goldilocks.tasks.tokenizer import character_tokenizer
from goldilocks.types import Failure, Rollout
from goldilocks.verl.guarded_reward import guarded
from goldilocks.verl.server.server import Answers
from goldilocks.verl.v1 import outbox
from goldilocks.verl.v1.agent_loop import StreamingWorker
from goldilocks.verl.v1.rows import FIRST, ROLLOUTS, VISIT_SEED
from goldilocks.verl.v1.single_turn import SingleTurn

LIMIT = 6  # tokens of an answer; the server does not know it, so that it is the worker that cuts


def prompt(index: int, n: int, first: int = 0, **fields: Any) -> dict[str, Any]:
    """The row of the dataset with its request, as the sampler sends it."""
    return {
        "raw_prompt": [{"role": "user", "content": f"{index}+{index}="}],
        "data_source": "goldilocks/arithmetic",
        "reward_model": {"style": "rule", "ground_truth": str(2 * index)},
        "extra_info": {"index": index, "difficulty": 1.0},
        "index": index,
        "tools_kwargs": {},
        "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
        "uid": f"g{index}",
        "global_steps": 3,
        ROLLOUTS: n,
        FIRST: first,
        VISIT_SEED: 7 + index,
        **fields,
    }


class Server:
    """Answers are a function of prompt and seed. ``hold`` keeps them until ``release``; an abort ends one at once."""

    def __init__(self, generation: Callable[[str, list[int], int], Generation], hold: bool = False) -> None:
        self._generation, self._hold = generation, hold
        self.messages: list[int] = []  # requests in each
        self.held: dict[str, asyncio.Future[bool]] = {}
        self.generate = SimpleNamespace(remote=self._generate)
        self.generate_all = SimpleNamespace(remote=self._generate_all)
        self.more_answers = SimpleNamespace(remote=self._more_answers)
        self._waves: dict[str, dict[asyncio.Task[Generation], str]] = {}
        self.abort_request = SimpleNamespace(remote=self.release)

    def release(self, request_id: str, whole: bool = False) -> None:
        """Answer a request that is held, with all of its tokens or with its first."""
        self.held.pop(request_id).set_result(whole)

    async def _answer(self, request_id: str, prompt_ids: list[int], seed: int) -> Generation:
        made = self._generation(request_id, prompt_ids, seed)
        if self._hold:
            self.held[request_id] = asyncio.get_running_loop().create_future()
            if not await self.held[request_id]:
                return Generation(request_id, made.token_ids[:1], made.log_probs[:1], made.top_log_probs[:1], "aborted")
        return made

    async def _generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        self.messages.append(1)
        made = await self._answer(request_id, prompt_ids, sampling_params["seed"])
        log_probs = made.log_probs if sampling_params["logprobs"] else None
        about = {"global_steps": 2, "top_log_probs": made.top_log_probs}
        return TokenOutput(
            token_ids=made.token_ids, log_probs=log_probs, stop_reason="completed", num_preempted=0, extra_fields=about
        )

    async def _generate_all(self, wave: str, requests: list[Any]) -> Answers:
        self.messages.append(len(requests))
        self._waves[wave] = {
            asyncio.create_task(self._answer(one, ids, params["seed"])): one for one, ids, params in requests
        }
        return await self._more_answers(wave)

    async def _more_answers(self, wave: str) -> Answers:
        tasks = self._waves[wave]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        outcomes = [(tasks.pop(task), task.exception() or task.result()) for task in done]
        return Answers(outcomes, global_steps=2, busy_s=0.0)


class Balancer:
    """verl's load balancer in this process, called as an actor is."""

    def __init__(self, **servers: Server) -> None:
        self.balancer = GlobalRequestLoadBalancer(dict(servers))

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **kwargs: Any) -> asyncio.Future[Any]:
            answer = asyncio.get_running_loop().create_future()
            answer.set_result(getattr(self.balancer, name)(*args, **kwargs))
            return answer

        return SimpleNamespace(remote=remote)


class Queue:
    """Keeps the rows that are put, by key."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        self.puts: list[int] = []

    async def async_kv_batch_put(self, keys: list[str], fields: Any, tags: list[dict], partition_id: str) -> None:
        assert partition_id == "train"
        self.puts.append(len(keys))
        for place, key in enumerate(keys):
            self.rows[key] = {name: _value(fields[name], place) for name in fields.keys()}  # noqa: SIM118
            self.tags[key] = tags[place]
        await asyncio.sleep(0)


def _value(column: Any, place: int) -> Any:
    return column.unbind()[place] if isinstance(column, torch.Tensor) else column[place]


class Worker(StreamingWorker):
    """Our worker, with what verl's constructor would have read from files and asked Ray for."""

    def __init__(self, *servers: Server, whole: bool, reward: str = "pkg://goldilocks.tasks.registry") -> None:
        rollout = {"name": "transformers", "max_num_seqs": 64, "prompt_length": 8, "response_length": LIMIT}
        self.config = OmegaConf.create(
            {
                "actor_rollout_ref": {"rollout": {**rollout, "full_determinism": False, "agent": {"num_workers": 1}}},
                "data": {},
                "reward": {
                    "custom_reward_function": guarded({"path": reward, "name": "compute_score"}),
                    "reward_manager": {"name": "naive", "source": "register"},
                    "reward_model": {"enable": False},
                },
            }
        )
        self.rollout_config = RolloutConfig(**rollout, calculate_log_probs=True)
        self.tokenizer, self.processor, self.hf_model_type = character_tokenizer(), None, "llama"
        self.dataset_cls, self.tools, self.mm_processor_kwargs = RLHFDataset, [], {}
        self.distillation_enabled = False
        manager = load_reward_manager(self.config, self.tokenizer)
        graded = SimpleNamespace(compute_score=SimpleNamespace(remote=manager.run_single))
        self.reward_loop_worker_handles = [graded]
        self.background_tasks: set[Any] = set()
        self._agent_loops = {}
        self.balancer = Balancer(**{f"s{place}": server for place, server in enumerate(servers)})
        self._listen(LLMServerClient(self.config, self.balancer))
        self.single_turn = SingleTurn(self) if whole else None

    async def finish(self) -> list[Rollout | Failure]:
        """Wait until every session that was started has ended; return what was told, in the order of sessions."""
        while self.background_tasks:
            await asyncio.gather(*self.background_tasks)
        return sorted(await self.events(), key=lambda event: (event.uid, event.index))


def queue_in(monkeypatch: Any, columns: bool = True) -> Queue:
    """A queue that the workers of this test put their rows into, and their errors nowhere."""
    queue = Queue()

    async def published(error: BaseException) -> None:
        """There is no TransferQueue to put the reason into."""

    monkeypatch.setattr(outbox, "transfer_queue", queue)
    monkeypatch.setattr(outbox, "takes_columns", lambda: columns)
    monkeypatch.setattr(agent_loop_tq, "tq", outbox.GatheringQueue())
    monkeypatch.setattr(agent_loop_tq, "list_of_dict_to_tensordict", list)
    monkeypatch.setattr("goldilocks.verl.v1.agent_loop.publish", published)
    monkeypatch.setattr("goldilocks.verl.v1.wave.publish", published)
    return queue
