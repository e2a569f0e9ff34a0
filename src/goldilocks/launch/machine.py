"""This machine: its device, its rollout engines, and the Ray that a run starts or joins.

A Ray that the run starts gets its sizes from the config and its environment from the driver. One that is already
running (``++ray_kwargs.ray_init.address=auto``) has its own sizes and refuses others, and its processes get only the
variables in ``runtime_env``. torch is imported only if there may be a GPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from goldilocks.platforms import threads_per_rank

if TYPE_CHECKING:
    from omegaconf import DictConfig

PRIVATE = "local"  # the address of a Ray that is one run's alone
THREADS = "OMP_NUM_THREADS"
SIZES = ("num_cpus", "num_gpus", "object_store_memory", "include_dashboard")
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


def is_private(config: DictConfig) -> bool:
    """Return whether the run starts a Ray of its own."""
    return bool(config.ray_kwargs.ray_init.get("address") == PRIVATE)


def join(config: DictConfig, env: Mapping[str, str]) -> None:
    """Adapt the config to a running Ray: no sizes, and ``env`` in its ``runtime_env``, where the user's values win."""
    from omegaconf import OmegaConf, open_dict  # ``goldilocks doctor`` starts without it

    with open_dict(config):
        ray_init = config.ray_kwargs.ray_init
        for size in SIZES:
            ray_init.pop(size, None)
        ray_init.runtime_env = OmegaConf.merge({"env_vars": dict(env)}, ray_init.get("runtime_env") or {})
