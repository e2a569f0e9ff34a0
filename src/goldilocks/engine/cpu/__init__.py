"""The environment variables by which verl chooses its platform on this machine.

verl picks its platform once, while it is imported, so the driver's environment must have them before. Importing this
module therefore imports neither verl nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from goldilocks.errors import require_known

DEVICES = ("cpu", "cuda")

PATCHES_VARIABLE = "GOLDILOCKS_PATCHES"  # which patches of verl a process applies: goldilocks.verl.plugin

# Parameters of a model that one thread computes: a second one gives it little, and where another process wants the
# core, each operation waits for it.
SMALL = 10_000_000

CGROUPS_OF_PROCESS, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

_SHARED = {
    # A tokenizer that was used before a fork warns on every fork, and verl forks a lot.
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A spare worker, which Ray starts before it is asked for one, has no runtime environment, and verl's workers have.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Ray hides every GPU from an actor that asks for none; the rollout server asks for none and sits on its worker's.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

_PLATFORM = {
    # A run is a dozen processes. Those that compute take their share of the cores themselves: threads_per_rank.
    # vLLM would bind threads to cores that others use, and take memory for caches that no tiny model fills (GiB).
    "cpu": {
        "VERL_PLATFORM": "cpu",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    },
    "cuda": {"VERL_PLATFORM": "nvidia"},
}


def platform_env(device: str) -> dict[str, str]:
    """Return the environment that verl and Ray need on ``device``; set it before verl is imported."""
    require_known("device", device, DEVICES)
    return {**_SHARED, **_PLATFORM[device], **patches_env()}


def patches_env() -> dict[str, str]:
    """All patches, for the processes of a run that our launchers start, unless the user has chosen."""
    return {PATCHES_VARIABLE: os.environ.get(PATCHES_VARIABLE, "all")}


def avoid_cudnn() -> None:
    """Leave attention to torch's other kernels, in this process: cuDNN's backward pass is wrong for some lengths.

    Since torch 2.11 masked attention on an H100 or H200 goes to cuDNN by default. Where the sequence is 64 longer than
    a multiple of 128, and all scores of a query are below about -89, the gradient of that query is NaN (pytorch issue
    196678). Training meets such lengths and queries. ``GOLDILOCKS_PATCHES=none`` leaves attention as it is.
    """
    if os.environ.get(PATCHES_VARIABLE) == "none":
        return
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def threads_per_rank(ranks: int) -> int:
    """Return the threads for each of ``ranks`` equal processes. Trainer and rollout server take turns.

    The cores of this machine are those of this process's affinity, within the quotas of its control groups.
    """
    quotas = [quota for folder in _control_groups() if (quota := _quota(folder)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])) // max(1, ranks))


def _control_groups() -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, and of those around them, of both versions."""
    lines = CGROUPS_OF_PROCESS.read_text().splitlines() if CGROUPS_OF_PROCESS.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = CGROUPS / controllers
        own = root / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _quota(folder: Path) -> float | None:
    """Return the cores that a control group may use, None where it has no limit of its own."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except FileNotFoundError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def threads_for(model: Any, ranks: int) -> int:
    """Return the threads of a process that computes this model on the CPU, one of ``ranks`` on this machine."""
    return 1 if sum(one.numel() for one in model.parameters()) < SMALL else threads_per_rank(ranks)
