"""The device and the rollout engines of this machine. torch is imported only if there may be a GPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from goldilocks.platforms import threads_per_rank

PRIVATE = "local"  # the address of a Ray that is one run's alone
THREADS = "OMP_NUM_THREADS"
ENGINES = ("transformers", "vllm", "sglang")


def share_of_cores(runs: int) -> dict[str, str]:
    """Return the variable that gives each of several runs its share of the cores, unless the user has set it."""
    chosen = THREADS in os.environ or runs == 1
    return {} if chosen else {THREADS: str(threads_per_rank(runs))}


def find_device() -> str:
    """Return ``cuda`` if torch can use an NVIDIA GPU, else ``cpu``."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(Path("/dev").glob("nvidia[0-9]*")):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def rollout_engines() -> list[str]:
    """Return the installed rollout engines, by the names ``actor_rollout_ref.rollout.name`` takes."""
    return [name for name in ENGINES if importlib.util.find_spec(name) is not None]


def rollout_engine(device: str) -> str:
    """Return the fastest installed engine for the device: vLLM on a GPU if it is installed, else our own."""
    return "vllm" if device == "cuda" and "vllm" in rollout_engines() else "transformers"
