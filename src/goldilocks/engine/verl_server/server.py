"""The rollout server: verl's token-in-token-out interface in front of one generation engine.

It is an asynchronous Ray actor. While generation is paused, requests wait, or come back aborted if verl asked for that.
They wait while the engine sleeps, too: verl puts it to sleep while conversations may go on, as in a validation.

``EngineLoop`` is the one thread that touches the engine; others send it functions to call. Every request ends: with its
generation, with the error that refused it, or with the failure of the engine, which from then on answers every call.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name, get_visible_devices_keyword
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from goldilocks.engine.cpu import threads_for
from goldilocks.engine.engine import Engine, Generation, SamplingParams, end_ids
from goldilocks.engine.verl_server.messages import ManyAnswers
from goldilocks.engine.verl_server.replica import Bucket, Named, receive_by_ipc
from goldilocks.errors import refuse
from goldilocks.types import hashed

Result = TypeVar("Result")

# verl's names of sampling parameters: those of ``SamplingParams``, and others.
_SAME_NAME = ("temperature", "top_p", "top_k", "seed")
_OTHERS = ("max_tokens", "max_new_tokens", "logprobs", "repetition_penalty", "stop_token_ids", "ignore_eos")
_KNOWN = {*_SAME_NAME, *_OTHERS}


class EngineFailed(RuntimeError):
    """The engine raised while it was generating; its state is unknown and it is not used again."""


class EngineLoop:
    """Runs ``engine`` in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiting: dict[str, Future[Generation]] = {}
        self._failure: Exception | None = None  # what the engine raised while it was generating
        threading.Thread(target=self._run, name="rollout-engine", daemon=True).start()

    async def generate(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> Generation:
        """The generation of one request; ``ValueError`` where the engine refuses it."""
        answer: Future[Generation] = Future()

        def submit() -> None:
            self._engine.submit(request_id, prompt_ids, params)
            self._waiting[request_id] = answer

        self._send(submit, answer)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:  # before the engine has seen the request or after
            self.call(partial(Engine.abort, request_id=request_id))
            raise

    def call(self, function: Callable[[Engine], Result]) -> Future[Result]:
        """Call ``function`` with the engine, between two of its steps."""
        future: Future[Result] = Future()
        self._send(lambda: future.set_result(function(self._engine)), future)
        return future

    def _send(self, work: Callable[[], None], future: Future[Any]) -> None:
        """Have the engine's thread do the work, unless ``future`` is cancelled before; an error becomes its own."""

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._failure is not None:
                    raise self._failed()
                work()
            except Exception as error:
                future.set_exception(error)

        self._commands.put(command)

    def in_flight(self) -> list[str]:
        """The ids of the requests that have not ended."""
        return list(self._waiting)

    def _run(self) -> None:
        while True:
            # A failed engine has no steps to take: the thread stays to answer every call with the reason.
            if self._failure is not None or not self._engine.busy:
                self._commands.get()()
            while not self._commands.empty():
                self._commands.get()()
            if self._failure is None and self._engine.busy:
                self._step()

    def _step(self) -> None:
        try:
            ended = self._engine.step()
        except Exception as error:
            self._failure = error
            while self._waiting:
                self._waiting.popitem()[1].set_exception(self._failed())
            return
        for generation in ended:
            self._waiting.pop(generation.request_id).set_result(generation)

    def _failed(self) -> EngineFailed:
        """Return an error for one request: the traceback of an exception that many raise grows with each."""
        failed = EngineFailed(f"the rollout engine failed: {type(self._failure).__name__}: {self._failure}")
        failed.__cause__ = self._failure
        return failed


class RolloutServer(ManyAnswers):
    """One model, one device, one engine; named, so that the worker beside it finds it."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int, visible_device: str | None) -> None:
        if visible_device is not None:  # before anything touches the device
            os.environ[get_visible_devices_keyword()] = visible_device
        self._config: RolloutConfig = omega_conf_to_dataclass(config)
        model: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self._seed = self._config.seed + replica_rank
        self._device = torch.device(get_device_name(), 0) if visible_device is not None else torch.device("cpu")
        policy = _model(self._config, model, self._device)
        if self._device.type == "cpu":
            torch.set_num_threads(threads_for(policy, self._config.n_gpus_per_node))
        self._max_length = self._config.max_model_len or self._config.prompt_length + self._config.response_length
        engine = Engine(
            policy,
            slots=self._config.max_num_seqs,
            max_length=self._max_length,
            eos_ids=end_ids(model.tokenizer, model.generation_config),
            pad_id=model.tokenizer.pad_token_id or 0,  # any valid id: padding is never attended to
            device=self._device,
        )
        self._loop = EngineLoop(engine)
        self._open, self._awake = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._awake.set()
        self._rejecting = False
        self._global_steps: int | None = None

    async def ready(self) -> str:
        """Return the address of the node once the engine is built."""
        return str(ray.util.get_node_ip_address()).strip("[]")

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Generate an answer. ``extra_fields["top_log_probs"]`` has the largest log-prob at each position."""
        if image_data or video_data or audio_data:
            raise ValueError("rollout.name='transformers' is not accepted: it takes text only; use rollout.name=vllm")
        prompt = [int(token) for token in prompt_ids]
        params = self._sampling_params(sampling_params, request_id, len(prompt))
        while not (self._open.is_set() and self._awake.is_set()):
            if self._rejecting:
                return self._output(Generation.unstarted(request_id), logprobs=False)
            await self._open.wait()
            await self._awake.wait()
        generation = await self._loop.generate(request_id, prompt, params)
        return self._output(generation, logprobs=bool(sampling_params.get("logprobs")))

    async def abort_request(self, request_id: str, **_ignored: Any) -> dict[str, Any]:
        """End one request with what it has; unknown ids are ignored, since the answer may have ended."""
        return {"aborted": request_id in await self.abort_requests([request_id]), "request_id": request_id}

    async def abort_requests(self, request_ids: Sequence[str]) -> list[str]:
        """End requests with what they have; return those that were in flight."""

        def abort(engine: Engine) -> list[str]:
            for name in request_ids:
                engine.abort(name)
            in_flight = set(self._loop.in_flight())
            return [name for name in request_ids if name in in_flight]

        return await self._on_engine(abort)

    async def abort_all_requests(self, reject_request: bool = False, **_ignored: Any) -> dict[str, Any]:
        """Pause generation and end every request with what it has; return when none is in flight."""
        self._rejecting = reject_request
        self._open.clear()

        def abort(engine: Engine) -> list[str]:
            engine.abort_all()
            return self._loop.in_flight()

        request_ids = await self._on_engine(abort)
        await self.wait_for_requests_to_drain()
        return {"aborted_count": len(request_ids), "request_ids": request_ids}

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._open.set()

    async def wait_for_requests_to_drain(self) -> None:
        """Return when no request is in flight, also of those that the engine's thread has not seen yet."""
        while await self._on_engine(lambda engine: engine.busy):
            await asyncio.sleep(0.001)

    async def sleep(self) -> None:
        """Release the memory of the cache once no request is in flight."""
        if self._config.free_cache_engine:
            self._awake.clear()
        await self.wait_for_requests_to_drain()
        if self._config.free_cache_engine:
            await self._on_engine(Engine.sleep)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate the cache again. The weights were not released."""
        if tags is None or "kv_cache" in tags:
            await self._on_engine(Engine.wake)
            self._awake.set()

    release_kv_cache, resume_kv_cache = sleep, wake_up  # there is only the cache to release

    async def clear_kv_cache(self) -> None:
        """Do nothing: ``load_weights`` forgets cached prompts."""

    async def load_weights(self, bucket: Bucket, last: bool, global_steps: int | None = None) -> None:
        """Overwrite these weights; the last ones of a policy update come with its number."""
        await self._on_engine(lambda engine: engine.load_weights(bucket.tensors(), last=last))
        if global_steps is not None:
            self._global_steps = global_steps

    async def load_weights_by_ipc(self, handle: str) -> None:
        """Overwrite the weights that a worker on the same device sends."""

        def load(named: list[Named], last: bool) -> None:
            self._loop.call(lambda engine: engine.load_weights(named, last=last)).result()

        await asyncio.to_thread(receive_by_ipc, handle, self._device, load)

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the policy update that the weights belong to."""
        self._global_steps = global_steps

    async def start_profile(self, **_ignored: Any) -> None:
        """Do nothing: this server has no profiler."""

    async def stop_profile(self) -> None:
        """See ``start_profile``."""

    async def _on_engine(self, function: Callable[[Engine], Result]) -> Result:
        return await asyncio.wrap_future(self._loop.call(function))

    def _sampling_params(self, given: dict[str, Any], request_id: str, prompt_length: int) -> SamplingParams:
        for name in set(given) - _KNOWN:
            refuse(f"sampling parameter {name}", given[name], f"one of {', '.join(sorted(_KNOWN))}")
        if (penalty := given.get("repetition_penalty", 1.0)) != 1.0:
            refuse("sampling parameter repetition_penalty", penalty, "1.0")
        if (room := self._max_length - prompt_length) < 1:
            accepted = f"fewer than {self._max_length}: raise data.max_prompt_length or filter_overlong_prompts=True"
            refuse("tokens of the prompt", prompt_length, accepted)
        limit = given.get("max_tokens", given.get("max_new_tokens", self._config.response_length))
        chosen = {name: given[name] for name in _SAME_NAME if given.get(name) is not None}
        if self._config.full_determinism:
            chosen.setdefault("seed", hashed(self._seed, request_id))  # of the request alone
        return SamplingParams(
            max_tokens=max(1, min(int(limit), room)),
            stop_ids=tuple(given.get("stop_token_ids") or ()),
            ignore_eos=bool(given.get("ignore_eos", self._config.ignore_eos)),
            **chosen,
        )

    def _output(self, generation: Generation, *, logprobs: bool) -> TokenOutput:
        return TokenOutput(
            token_ids=generation.token_ids,
            log_probs=generation.log_probs if logprobs else None,
            stop_reason="aborted" if generation.stop_reason == "aborted" else "completed",
            num_preempted=0,
            extra_fields={"global_steps": self._global_steps, "top_log_probs": generation.top_log_probs},
        )


def _model(config: RolloutConfig, model: HFModelConfig, device: torch.device) -> Any:
    """Return the model in the rollout's precision; with ``load_format=dummy`` the first update brings its weights."""
    auto: Any = AutoModelForCausalLM
    precision: Any = PrecisionType
    options = {"dtype": precision.to_dtype(config.dtype), "trust_remote_code": model.trust_remote_code}
    with device:
        if config.load_format == "dummy":
            return auto.from_config(model.hf_config, **options)
        return auto.from_pretrained(model.local_path, config=model.hf_config, **options)
