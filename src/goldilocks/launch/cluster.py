"""Joining a Ray that is already there: ``++ray_kwargs.ray_init.address=auto``.

A Ray that the run starts gets its sizes from the config and its environment from the driver. A Ray that is already
running has its own sizes and refuses others, and its processes get only the variables in ``runtime_env``.
"""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf, open_dict

from goldilocks.launch.machine import PRIVATE

SIZES = ("num_cpus", "num_gpus", "object_store_memory", "include_dashboard")


def is_private(config: DictConfig) -> bool:
    """Return whether the run starts a Ray of its own."""
    return bool(config.ray_kwargs.ray_init.get("address") == PRIVATE)


def join(config: DictConfig, env: Mapping[str, str]) -> None:
    """Adapt the config to a running Ray: no sizes, and ``env`` in its ``runtime_env``, where the user's values win."""
    with open_dict(config):
        ray_init = config.ray_kwargs.ray_init
        for size in SIZES:
            ray_init.pop(size, None)
        ray_init.runtime_env = OmegaConf.merge({"env_vars": dict(env)}, ray_init.get("runtime_env") or {})
