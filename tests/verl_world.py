"""A small world for verl's V1: verl's own classes in this process, and one stand-in for each thing outside of it.

Real are the load balancer, its client, the agent loop, the reward manager and the packing of rows. The stand-ins are
``Actor`` for the handle of a Ray actor, ``Server`` for a rollout server and ``Queue`` for the TransferQueue.
tests/unit/test_canary.py compares their signatures with the real.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.config import RolloutConfig
from verl.workers.rollout.llm_server import GlobalRequestLoadBalancer, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from goldilocks.engine.engine import Generation
from goldilocks.engine.verl_server.messages import Answer, ManyAnswers
from goldilocks.rewards.calls import guard
from goldilocks.tasks.tiny_model import character_tokenizer
from goldilocks.types import Failure, Rollout
from goldilocks.verl import store
from goldilocks.verl.dispatch import failures
from goldilocks.verl.dispatch.backend import FIRST, ROLLOUTS, VISIT_SEED
from goldilocks.verl.dispatch.client import StreamingClient, current_session
from goldilocks.verl.dispatch.single_turn import SingleTurn
from goldilocks.verl.dispatch.worker import StreamingWorker

LIMIT = 6  # tokens of an answer; the server does not know the limit, so that the worker cuts
ROLLOUT = {"name": "transformers", "max_num_seqs": 64, "prompt_length": 8, "response_length": LIMIT}
ABORTED = [7, 8]  # what an aborted request has written
VERSION = 2  # of the weights of every server

Write = Callable[[str, list[int], int], Generation]  # the answer to a request's name, prompt and seed


# -- Ray ---------------------------------------------------------------------------------------------------------------


class Actor:
    """Stands for the handle of a Ray actor: calls ``subject``, and counts the calls of each method."""

    def __init__(self, subject: Any) -> None:
        self.subject = subject
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self.subject, name):
            raise AttributeError(name)
        return SimpleNamespace(remote=functools.partial(self._call, name))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Return what the method returns or raises; the caller may leave that unread."""
        self.calls[name] += 1
        reply = asyncio.get_running_loop().create_future()
        try:
            found = getattr(self.subject, name)(*args, **kwargs)
        except Exception as error:
            reply.set_exception(error)
        else:
            if inspect.isawaitable(found):
                return asyncio.ensure_future(found)
            reply.set_result(found)
        return reply


def balancer_of(**handles: Any) -> Actor:
    """Return verl's load balancer over the servers of these handles, called as an actor is."""
    return Actor(GlobalRequestLoadBalancer(handles))


# -- rollout servers and their client ----------------------------------------------------------------------------------


class Server(ManyAnswers):
    """Stands for our rollout server, and in ``generate`` for verl's servers of vLLM and SGLang.

    ``write`` answers at once; without it a request is held until ``answer`` or an abort.
    """

    STANDS_FOR = ("generate", "generate_all", "more_answers", "abort_request", "abort_requests")

    def __init__(self, write: Write | None = None, *, aborts: bool = True) -> None:
        self._write, self._aborts = write, aborts
        self.messages: list[int] = []  # how many requests each message of many had
        self.prompts: list[list[int]] = []
        self.prompt_of: dict[str, list[int]] = {}  # of each request, by its name
        self.params: list[dict[str, Any]] = []
        self.held: dict[str, asyncio.Future[Generation]] = {}
        self.most_held = 0
        self.asked_to_abort: list[str] = []
        self.aborts_asked_at_once: list[int] = []

    async def holds(self, requests: int) -> list[str]:
        """Wait until so many requests are held; return their names."""
        while len(self.held) < requests:
            await asyncio.sleep(0)
        return list(self.held)

    def answer(self, request_id: str, token_ids: list[int]) -> None:
        """Answer a request that is held."""
        self.held.pop(request_id).set_result(written(request_id, token_ids))

    def answer_all(self) -> None:
        """Answer every request that is held, with three tokens."""
        for request_id in list(self.held):
            self.answer(request_id, [1, 2, 3])

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        made = await self._answered(request_id, prompt_ids, sampling_params)
        return TokenOutput(
            token_ids=made.token_ids,
            log_probs=made.log_probs if sampling_params.get("logprobs") else None,
            stop_reason="aborted" if made.stop_reason == "aborted" else "completed",
            num_preempted=0,
            extra_fields={"global_steps": VERSION, "top_log_probs": made.top_log_probs},
        )

    async def generate_all(self, batch: str, requests: list[Any]) -> list[Answer]:
        self.messages.append(len(requests))
        return await super().generate_all(batch, requests)

    async def abort_request(self, request_id: str, **_: Any) -> dict[str, Any]:
        self.asked_to_abort.append(request_id)
        ends = self._aborts and request_id in self.held
        if ends:
            self.held.pop(request_id).set_result(written(request_id, ABORTED, "aborted"))
        return {"aborted": ends, "request_id": request_id}

    async def abort_requests(self, request_ids: Sequence[str]) -> list[str]:
        self.aborts_asked_at_once.append(len(request_ids))
        answers = [await self.abort_request(name) for name in request_ids]
        return [answer["request_id"] for answer in answers if answer["aborted"]]

    async def _answered(self, request_id: str, prompt_ids: list[int], params: dict[str, Any]) -> Generation:
        self.prompts.append(prompt_ids)
        self.prompt_of[request_id] = prompt_ids
        self.params.append(params)
        if self._write is not None:
            return self._write(request_id, prompt_ids, params["seed"])
        self.held[request_id] = asyncio.get_running_loop().create_future()
        self.most_held = max(self.most_held, len(self.held))
        return await self.held[request_id]


class VllmServer(Server):
    """Stands for verl's vLLM server, with the methods that we add to it."""

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        output = await super().generate(prompt_ids, dict(sampling_params), request_id)
        sampling_params.pop("logprobs", None)  # as verl's does
        output.num_preempted = None
        output.extra_fields["num_cached_tokens"] = 0
        return output

    def __ray_call__(self, function: Any, request_ids: Sequence[str]) -> Any:
        """End requests; tests/with_vllm has the function that does so."""
        return self.abort_requests(request_ids)


def written(request_id: str, token_ids: list[int], stop_reason: str = "stop") -> Generation:
    """Return an answer whose tokens all have the same log-probs."""
    count = len(token_ids)
    return Generation(request_id, token_ids, [-1.0] * count, [-0.5] * count, stop_reason)


def client_of(balancer: Actor, *, workers: int = 1, gates: bool = False, **rollout: Any) -> StreamingClient:
    """Return our client over verl's: that of one of so many workers, with these keys of ``rollout``."""
    keys = {"name": "transformers", "max_num_seqs": 1024, "prompt_length": 8, "response_length": 10}
    keys["agent"] = {"num_workers": workers}
    config = {"actor_rollout_ref": {"rollout": {**keys, **rollout}}, "batch_filter": {"enable_two_gate_filter": gates}}
    return StreamingClient(LLMServerClient(config=OmegaConf.create(config), load_balancer_handle=balancer))


def one_server(server: Server, **options: Any) -> StreamingClient:
    return client_of(balancer_of(a=Actor(server)), **options)


def start(client: StreamingClient, uid: str, index: int, **params: Any) -> asyncio.Task[Any]:
    async def run() -> Any:
        session = client.begin(uid, index)
        current_session.set(session)
        try:
            asked = {"logprobs": True, **params}
            return await client.generate(f"{uid}{index}", prompt_ids=[1], sampling_params=asked)
        finally:
            client.end(session)

    return asyncio.create_task(run())


# -- the TransferQueue -------------------------------------------------------------------------------------------------


class Queue:
    """Stands for the functions of ``transfer_queue``, for one test: rows and their tags by key, and others' tags.

    verl's functions pack and unpack the rows.
    """

    STANDS_FOR = ("kv_batch_get", "kv_batch_put", "async_kv_batch_put", "async_kv_put", "kv_list", "kv_clear")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        self.puts: list[int] = []  # how many rows each asynchronous put had
        self._others: dict[str, dict[str, Any]] = {}  # tags by partition and key
        for name in self.STANDS_FOR:
            monkeypatch.setattr(transfer_queue, name, getattr(self, name))
        monkeypatch.setattr(store, "kv_batch_meta2batch_meta", self.meta)
        monkeypatch.setattr(failures, "_published", False)  # as in a process that has told no error yet

    def batch(self) -> KVBatchMeta:
        """Return all rows."""
        return KVBatchMeta(partition_id="train", keys=list(self.rows), tags=list(self.tags.values()))

    def add(self, key: str, version: int | None, length: int, *, step: int = 1, **log_probs: float) -> None:
        """Add a row whose tokens all have the same log-probs; the reward of rollout ``i`` of a group is ``i % 2``."""
        scores = torch.zeros(length)
        scores[-1] = int(key.split("_")[1]) % 2
        fields = {name: torch.full((length,), value) for name, value in log_probs.items()}
        mask = torch.ones(length, dtype=torch.long)
        self.rows[key] = {"response_mask": mask, "rm_scores": scores, "extra_fields": {}, **fields}
        self.tags[key] = {"min_global_steps": version, "global_steps": step}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> TensorDict:
        assert partition_id == "train"
        names = [name for name in select_fields or self.rows[keys[0]] if name in self.rows[keys[0]]]
        return list_of_dict_to_tensordict([{name: self.rows[key][name] for name in names} for key in keys])

    def meta(self, batch: KVBatchMeta) -> Any:
        """Return which fields the rows have, and whether they are tensors."""
        fields = {name: value for key in batch.keys for name, value in self.rows[key].items()}
        schema = {name: {"is_non_tensor": not isinstance(value, torch.Tensor)} for name, value in fields.items()}
        return SimpleNamespace(field_schema=schema)

    def kv_batch_put(
        self, keys: list[str], partition_id: str, fields: Any = None, tags: Any = None, data_parser: None = None
    ) -> None:
        assert partition_id == "train"
        for key, tag in zip(keys, tags or (), strict=bool(tags)):
            self.tags[key] = tag
        for name, column in fields.items():
            for key, value in zip(keys, column if isinstance(column, list) else column.unbind(0), strict=True):
                self.rows.setdefault(key, {})[name] = value.data if isinstance(value, NonTensorData) else value

    async def async_kv_batch_put(
        self, keys: list[str], partition_id: str, fields: Any = None, tags: Any = None, data_parser: None = None
    ) -> None:
        self.puts.append(len(keys))
        self.kv_batch_put(keys, partition_id, fields, tags)
        await asyncio.sleep(0)

    async def async_kv_put(
        self, key: str, partition_id: str, fields: None = None, tag: Any = None, data_parser: None = None
    ) -> None:
        self._tags_of(partition_id)[key] = tag

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        known = {"train": self.tags, **self._others}
        return known if partition_id is None else {partition_id: known.get(partition_id, {})}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            del self._tags_of(partition_id)[key]
            if partition_id == "train":
                del self.rows[key]

    def _tags_of(self, partition_id: str) -> dict[str, Any]:
        return self.tags if partition_id == "train" else self._others.setdefault(partition_id, {})


def nested(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return rows of several lengths as verl has them in one tensor."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def comparable(value: Any) -> Any:
    """Return a tensor as its type and its numbers, and any other value of a row as it is."""
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


# -- the agent-loop worker ---------------------------------------------------------------------------------------------


class Worker(StreamingWorker):
    """Our worker, with what verl's constructor would have read from files and asked Ray for.

    ``whole``: whether it makes rollouts many at a time. ``reward`` is the file with ``compute_score``, ``rewards`` the
    section ``goldilocks.rewards`` that says how it is called.
    """

    LEFT_OUT = ("teacher_client", "teacher_key", "teacher_server_manager")  # set by verl, not read here

    def __init__(
        self,
        *servers: Server,
        whole: bool,
        reward: str = "pkg://goldilocks.tasks.registry",
        rewards: dict[str, Any] | None = None,
    ) -> None:
        graded_by = {"custom_reward_function": {"path": reward, "name": "compute_score"}, "num_workers": 1}
        manager = {"reward_manager": {"name": "naive", "source": "register"}, "reward_model": {"enable": False}}
        rollout = {**ROLLOUT, "full_determinism": False, "agent": {"num_workers": 1}}
        parts = {"actor_rollout_ref": {"rollout": rollout}, "data": {}, "reward": {**graded_by, **manager}}
        self.config = OmegaConf.create({**parts, "goldilocks": {"rewards": rewards or {}}})
        guard(self.config)
        self.rollout_config = RolloutConfig(**ROLLOUT, calculate_log_probs=True)
        self.tokenizer, self.processor, self.hf_model_type = character_tokenizer(), None, "llama"
        self.dataset_cls, self.tools, self.mm_processor_kwargs = RLHFDataset, [], {}
        self.model_config = SimpleNamespace(generation_config=None)
        self.distillation_enabled = False
        run_single = load_reward_manager(self.config, self.tokenizer).run_single
        self.grader = Actor(SimpleNamespace(compute_score=run_single))
        self.reward_loop_worker_handles = [self.grader]
        self.background_tasks: set[Any] = set()
        self.balancer = balancer_of(**{f"s{place}": Actor(server) for place, server in enumerate(servers)})
        self._listen(LLMServerClient(self.config, self.balancer))
        self.single_turn = SingleTurn(self) if whole else None

    async def finish(self) -> list[Rollout | Failure]:
        """Wait until every session that was started has ended; return the new events, in the order of sessions."""
        while self.background_tasks:
            await asyncio.gather(*self.background_tasks)
        return sorted((await self.so_far(False)).events, key=lambda event: (event.uid, event.index))


def prompt(index: int, n: int, first: int = 0, **fields: Any) -> dict[str, Any]:
    """Return the row of the dataset with its request, as the sampler sends it."""
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
