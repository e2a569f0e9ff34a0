from __future__ import annotations

import os

import pytest
import torch

from goldilocks.engine.cpu import DEVICES, SMALL, TINY, HostSettings, platform_env, threads_per_rank
from goldilocks.engine.cpu.verl_platform import PlatformCPU


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_names_a_platform_verl_knows(device: str) -> None:
    from verl.plugin.platform import PlatformRegistry

    import goldilocks.verl.plugin  # noqa: F401

    assert PlatformRegistry.get(platform_env(device)["VERL_PLATFORM"]) is not None


def test_an_unknown_device_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"device='tpu' is not accepted: one of cpu, cuda"):
        platform_env("tpu")


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


def test_ranks_share_the_cores_and_each_gets_at_least_one() -> None:
    cores = threads_per_rank(1)
    assert threads_per_rank(2) == max(1, cores // 2)
    assert threads_per_rank(10_000) == 1


def linear(parameters: int) -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Linear(parameters // 10, 10, bias=False)


def test_a_small_model_has_one_thread_and_a_tiny_one_no_one_dnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert [HostSettings.of(linear(TINY - 10), ranks) for ranks in (1, 2)] == [(1, False), (1, False)]
    assert [HostSettings.of(linear(size), 1) for size in (TINY, SMALL - 10)] == [(1, True), (1, True)]
    assert [HostSettings.of(linear(SMALL), ranks) for ranks in (1, 2, 16)] == [(8, True), (4, True), (1, True)]


def test_one_dnn_is_left_alone_elsewhere_and_for_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert HostSettings.of(linear(TINY // 2).to(torch.bfloat16), 1).one_dnn
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert HostSettings.of(linear(TINY // 2), 1).one_dnn


def test_what_a_pass_switches_off_is_as_before_after_it_and_what_torch_switches_off_stays_off() -> None:
    tiny, large = HostSettings(1, one_dnn=False), HostSettings(1, one_dnn=True)
    torch.backends.mkldnn.enabled = True
    with tiny.applied():
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled
    with large.applied():
        torch.backends.mkldnn.enabled = False
    assert not torch.backends.mkldnn.enabled
    large.apply()
    assert not torch.backends.mkldnn.enabled
