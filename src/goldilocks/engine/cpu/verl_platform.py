"""verl's platform ``cpu``: a machine with no accelerator, presented through the calls verl makes on one.

It is never detected: on a cluster the driver often sits on a node without a GPU. ``VERL_PLATFORM=cpu`` selects it
(:func:`goldilocks.engine.cpu.platform_env`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """There is no device to talk to."""


class _HostAsDevice(ModuleType):
    """``torch.cpu`` with the memory and RNG calls that verl makes on ``torch.cuda``."""

    empty_cache = ipc_collect = set_device = synchronize = reset_peak_memory_stats = staticmethod(_nothing)
    memory_allocated = memory_reserved = staticmethod(lambda *_, **__: 0)
    max_memory_allocated = max_memory_reserved = memory_allocated

    @staticmethod
    def get_device_name(_device: Any = None) -> str:
        return "CPU"  # a key of verl's table of peak FLOPS

    @staticmethod
    def get_rng_state(_device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, _device: Any = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def mem_get_info(_device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The host as verl's device."""

    device_name = vendor_name = "cpu"
    device_module = _HostAsDevice("goldilocks.engine.cpu.verl_platform.device")

    set_device = synchronize = set_allocator_settings = empty_cache = staticmethod(_nothing)
    profiler_start = profiler_stop = cudart = staticmethod(_nothing)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> Any:
        # verl hands this to Tensor.to(), where a number would mean a CUDA device.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        # verl's resource pools count GPU and NPU only: Ray is started with as many logical GPUs as there are ranks.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False
