"""``benchmarks/rollout.py --peer vllm``: vLLM answers the workload with a log-prob for each token, as we do."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

CPU = torch.device("cpu")
ROLLOUT = Path(__file__).parents[2] / "benchmarks" / "rollout.py"


def test_vllm_stands_beside_the_engine() -> None:
    script = runpy.run_path(str(ROLLOUT))
    work = script["ragged"](2, 2, 8, 16, 4)
    machine = script["Machine"](bytes_per_s=1e9, flops_per_s=1e9)
    (slow,) = script["time_vllm"](script["load"]("3M", torch.float32, CPU), [work])  # counts every token
    row = script["measure"](work, slow, script["load"]("3M", torch.float32, CPU), machine)
    vllm, engine = (float(speed.replace(",", "")) for speed in row[1:3])
    assert vllm > 0
    assert engine > 0
