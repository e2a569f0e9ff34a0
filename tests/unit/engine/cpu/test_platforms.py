from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from goldilocks.engine import cpu
from goldilocks.engine.cpu import DEVICES, SMALL, platform_env, threads_for, threads_per_rank
from goldilocks.engine.cpu.verl_platform import PlatformCPU


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_names_a_platform_verl_knows(device: str) -> None:
    from verl.plugin.platform import PlatformRegistry

    import goldilocks.verl.plugin  # noqa: F401

    assert PlatformRegistry.get(platform_env(device)["VERL_PLATFORM"]) is not None


def test_the_cpu_platform_is_never_taken_for_an_accelerator() -> None:
    platform = PlatformCPU()
    assert not platform.is_platform_available(use_smi_check=True)
    assert not platform.is_ipc_supported()
    assert torch.zeros(1).to(platform.current_device()).device.type == "cpu"


def test_the_host_answers_the_calls_verl_makes_on_a_device() -> None:
    device = PlatformCPU().device_module
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    free, total = device.mem_get_info()
    assert 0 < free <= total
    assert device.max_memory_allocated() == 0
    assert device.is_available()  # torch.cpu's own


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/a/b", {"a/cpu.max": "350000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("4:memory:/a\n2:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "400000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 4),
        ("2:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 8),
        ("0::/../outside", {}, 8),
        (None, {}, 8),
    ],
)  # fmt: skip
def test_a_quota_of_the_control_groups_limits_the_threads(
    groups: str | None, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if groups is not None:
        (tmp_path / "of_process").write_text(groups)
    monkeypatch.setattr(cpu, "CGROUPS_OF_PROCESS", tmp_path / "of_process")
    monkeypatch.setattr(cpu, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert (threads_per_rank(1), threads_per_rank(2)) == (cores, max(1, cores // 2))


def linear(parameters: int) -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Linear(parameters // 10, 10, bias=False)


def test_a_small_model_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [threads_for(linear(SMALL - 10), ranks) for ranks in (1, 2)] == [1, 1]
    assert [threads_for(linear(SMALL), ranks) for ranks in (1, 2, 16)] == [8, 4, 1]
