"""Joining a Ray that is already there: ``++ray_kwargs.ray_init.address=auto``.

A Ray started for one run is given its sizes and inherits its environment. One that others started has sizes of its own
and refuses others, and its processes know of the run's environment what Ray is told to hand on.
"""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf, open_dict

PRIVATE = "local"  # the address of a Ray that is this run's alone
SIZES = ("num_cpus", "num_gpus", "object_store_memory", "include_dashboard")


def is_private(config: DictConfig) -> bool:
    """Whether the run has a Ray of its own."""
    return bool(config.ray_kwargs.ray_init.get("address") == PRIVATE)


def join(config: DictConfig, env: Mapping[str, str]) -> None:
    """Make the config one for a Ray that is there; variables that the user hands on himself stay as he says."""
    with open_dict(config):
        ray_init = config.ray_kwargs.ray_init
        for size in SIZES:
            ray_init.pop(size, None)
        ray_init.runtime_env = OmegaConf.merge({"env_vars": dict(env)}, ray_init.get("runtime_env") or {})
