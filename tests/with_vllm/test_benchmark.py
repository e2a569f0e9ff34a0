"""``benchmarks/rollout.py --peer vllm``: vLLM answers the workload with a log-prob for each token, as we do."""

from __future__ import annotations

import pytest
import rollout
import torch

pytest.importorskip("vllm")

from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

CPU = torch.device("cpu")


def test_vllm_stands_beside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a process of its own would import everything again
    work = rollout.ragged(2, 2, 8, 16, 4)
    machine = rollout.Machine(bytes_per_s=1e9, flops_per_s=1e9)
    (slow,) = rollout.time_vllm(rollout.load("3M", torch.float32, CPU), [work])  # counts every token
    cleanup_dist_env_and_memory()
    row = rollout.measure(work, slow, rollout.load("3M", torch.float32, CPU), machine)
    vllm, engine = (float(speed.replace(",", "")) for speed in row[1:3])
    assert vllm > 0
    assert engine > 0
