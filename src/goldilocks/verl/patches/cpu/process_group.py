"""A process group on a machine without a GPU."""

from __future__ import annotations

import functools

from goldilocks.verl.patch import Function, Kind, Patch


def gloo_group_on_cpu(original: Function) -> Function:
    """Ask torch for one backend on the CPU: verl asks for ``cpu:gloo,cpu:gloo``, which torch rejects."""

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        from verl.utils.device import get_device_name

        if backend is None and get_device_name() == "cpu":
            backend = "cpu:gloo"
        original(timeout_second=timeout_second, backend=backend)

    return initialize_global_process_group_ray


PROCESS_GROUP = Patch(
    name="process-group",
    kind=Kind.CPU,
    module="verl.utils.distributed",
    replaced={"initialize_global_process_group_ray": gloo_group_on_cpu},
    written_for={"initialize_global_process_group_ray": "761a94d1a2e058d3"},
    reason="verl asks torch for two backends for one device on the CPU, which torch rejects",
    changes="nothing where there is an accelerator",
    without="no worker starts",
    needless_when="verl names one backend where the accelerator is the CPU",
    platform="cpu",
)
