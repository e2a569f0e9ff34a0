"""Which processes import vLLM: the servers' own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

# A training worker imports the first two, the task runner all of them.
IMPORTS = """
import sys
from verl.workers.rollout.base import get_rollout_class
import verl.workers.engine_workers
assert get_rollout_class("vllm", "async").__name__ == "ServerAdapter"
import verl.trainer.ppo.v1
from verl.workers.rollout.replica import get_rollout_replica_class
replica = get_rollout_replica_class("vllm")
assert "vllm" not in sys.modules
import torch._inductor.config
assert torch._inductor.config.compile_threads == 1, "as vLLM sets it"

import inspect
from verl.third_party.vllm import VLLM_SLEEP_LEVEL
from goldilocks.verl.serve.light_vllm import read
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
import vllm
import verl.third_party.vllm
assert VLLM_SLEEP_LEVEL == 2
assert verl.third_party.vllm.LLM is vllm.LLM
assert replica.launch_servers.__code__.co_code == vLLMReplica.launch_servers.__code__.co_code


def methods(one):
    return {name for name, _ in inspect.getmembers(one, inspect.isfunction)}


assert methods(read()[1]) == methods(vLLMHttpServer) | {"become"}
"""


def test_neither_a_training_worker_nor_the_task_runner_imports_vllm() -> None:
    env = {**os.environ, "VERL_PLATFORM": "cpu", "GOLDILOCKS_PATCHES": "all"}
    ended = subprocess.run([sys.executable, "-c", IMPORTS], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
