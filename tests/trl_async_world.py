"""A small world for TRL's asynchronous trainer on the CPU: a server over HTTP, its worker, and attention over trees.

TRL needs vLLM, a GPU and a child process that takes many seconds to import everything. Here a server of vLLM's protocol
answers with the tiny model, the child is a thread, and the attention kernel is torch's. The server keeps the weights of
the start, so what it answers depends on what it is asked and never on when.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl_world as world
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, async_rollout_worker, packing

from goldilocks.tasks.tiny_model import build, character_tokenizer
from goldilocks.trl.async_trainer import GoldilocksAsyncGRPOTrainer
from goldilocks.types import hashed

SCHEMA = {
    "type": "object",
    "properties": {"role": {"const": "assistant"}, "content": {"type": "string", "x-regex": "^([^<]*)"}},
}
LENGTH = 64  # of the server's context


@cache
def model_folder(root: Path) -> str:
    """Save the tiny model, untrained, with its tokenizer."""
    tokenizer = character_tokenizer()
    tokenizer.response_schema = SCHEMA
    build(tokenizer, seed=0).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    return str(root / "model")


class Server:
    """vLLM's protocol, as far as TRL speaks it. Requests are answered one at a time."""

    def __init__(self, *, seeded: bool) -> None:
        """``seeded``: noise is of the request's seed. Else it is of how often the prompt was asked for."""
        self._seeded = seeded
        self._tokenizer = character_tokenizer()
        self._model = build(self._tokenizer, seed=0).eval()
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._one = threading.Lock()
        self.failing = 0  # so many requests are answered with an error
        self.adapters: list[str] = []  # by the names that they were loaded under

    @torch.no_grad()
    def complete(self, prompt: list[int], max_tokens: int, seed: int) -> dict[str, Any]:
        with self._one:
            self._asked[tuple(prompt)] += 1
            noise = hashed(seed) if self._seeded else hashed(*prompt, self._asked[tuple(prompt)])
            generator = torch.Generator().manual_seed(noise)
            ids, log_probs = list(prompt), []
            while len(log_probs) < max_tokens and (not log_probs or ids[-1] != self._tokenizer.eos_token_id):
                likely = self._model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                ids.append(int(torch.multinomial(likely.exp(), 1, generator=generator)))
                log_probs.append(float(likely[ids[-1]]))
        choice = {"token_ids": ids[len(prompt) :], "logprobs": {"token_logprobs": log_probs}}
        return {"choices": [choice]}

    def control(self, path: str, asked: dict[str, Any]) -> int:
        """Do what the trainer asks the server for; return HTTP's status. As in vLLM, no adapter has two versions."""
        name = asked.get("lora_name", "")
        if path == "/v1/load_lora_adapter":
            if name in self.adapters:
                return 400
            self.adapters.append(name)
        elif path == "/v1/unload_lora_adapter" and name in self.adapters:
            self.adapters.remove(name)
        return 200

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve; yield the address."""
        server = self

        class Listener(ThreadingHTTPServer):
            request_queue_size = 128  # a connection that is refused is tried again a second later

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections are kept
            disable_nagle_algorithm = True

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                models = [{"id": name, "max_model_len": LENGTH} for name in ("model", *server.adapters)]
                parallel, lora = {"data_parallel_size": 1}, {"max_lora_rank": 8, "max_loras": 8}
                self._reply({"data": models, "vllm_config": {"parallel_config": parallel, "lora_config": lora}})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
                if not self.path.startswith("/v1/completions"):
                    self._reply({}, server.control(self.path, asked))
                    return
                if server.failing > 0:
                    server.failing -= 1
                    self.send_error(400)
                    return
                self._reply(server.complete(asked["prompt"], asked["max_tokens"], asked["seed"]))

            def _reply(self, value: dict[str, Any], status: int = 200) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        with Listener(("127.0.0.1", 0), Handler) as http:
            threading.Thread(target=http.serve_forever, daemon=True).start()
            try:
                yield f"http://127.0.0.1:{http.server_port}"
            finally:
                http.shutdown()


class NoTransfer:
    """The server keeps its weights."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...
    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass


class ThreadChild(threading.Thread):
    """A thread in the place of the worker's child process."""

    _popen = pid = exitcode = None

    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def attend(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, *_: Any, softmax_scale: float, **__: Any) -> Any:
    """Attend as the kernel does: each segment sees the path that leads to it, and itself up to each token."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    parts = []
    for number in range(len(starts_q) - 1):
        asking = q[starts_q[number] : starts_q[number + 1]].transpose(0, 1)
        path = slice(int(starts_k[number]), int(starts_k[number + 1]))
        length = path.stop - path.start
        seen = torch.ones(asking.shape[1], length, dtype=torch.bool).tril(length - asking.shape[1])
        keys, values = k[path].transpose(0, 1), v[path].transpose(0, 1)
        parts.append(scaled_dot_product_attention(asking, keys, values, seen, scale=softmax_scale).transpose(0, 1))
    return torch.cat(parts)


def on_the_cpu(patch: Any, *, threads: bool = True) -> None:
    """Take the place of what needs a GPU or vLLM; ``patch(object, name, value)``."""
    patch(async_rollout_worker, "is_vllm_available", lambda *_, **__: True)
    patch(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # it asks CUDA
    patch(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attend))
    if threads:
        context = async_rollout_worker.mp.get_context("spawn")
        patch(type(context), "Process", ThreadChild)
        patch(async_rollout_worker, "_scrub_child_env", lambda: None)


def trainer(
    out: Path, address: str, kind: Any = GoldilocksAsyncGRPOTrainer, sections: Any = None, **chosen: Any
) -> Any:
    """Return a trainer of the tiny model: two groups of four an update."""
    defaults: dict[str, Any] = {
        "output_dir": str(out),
        "vllm_server_base_url": address,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 6,
        "token_budget": 0,
        "max_inflight_tasks": 4,
        "learning_rate": 1e-2,
        "max_steps": 4,
        **world.QUIET,
    }
    data, rewards = chosen.pop("data", None), chosen.pop("reward_funcs", world.reward)
    extra = {name: chosen.pop(name) for name in ("tools", "callbacks", "peft_config") if name in chosen}
    if "peft_config" not in extra:  # an adapter goes to the server by TRL's own way, as a folder
        extra["weight_transfer"] = NoTransfer()
    return kind(
        model=model_folder(out.parent),
        reward_funcs=rewards,
        args=AsyncGRPOConfig(**{**defaults, **chosen}),
        train_dataset=data or world.dataset(10),
        **extra,
        **(sections or {}),
    )
