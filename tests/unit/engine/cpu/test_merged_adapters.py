"""verl's engine on the CPU hands its weights on, merged ones in fp32, and trains on with those that it had."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from verl.utils.fsdp_utils import apply_fsdp2

from goldilocks.engine.cpu.fsdp import LanguageModelOnHost
from goldilocks.tasks.tiny_model import build, character_tokenizer

IDS = torch.arange(18).reshape(2, 9)


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Any) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def adapted(targets: Any) -> Any:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=targets)
    model = peft.get_peft_model(build(character_tokenizer(), seed=0), config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    return sharded(model)


def sharded(model: Any) -> Any:
    fp32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    apply_fsdp2(model, {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": fp32, "reshard_after_forward": True}, {})
    return model


@torch.no_grad()
def log_probs(model: Any) -> torch.Tensor:
    return model(IDS).logits.log_softmax(-1)


@pytest.mark.parametrize("targets", [["q_proj"], "all-linear"])
def test_merged_weights_have_the_log_probs_that_are_trained(targets: Any) -> None:
    engine = object.__new__(LanguageModelOnHost)  # without the files and processes that its constructor asks for
    engine.module = adapted(targets)
    trained, plain = log_probs(engine.module), build(character_tokenizer(), seed=0).eval()
    assert (log_probs(plain) - trained).abs().max() > 1e-2
    plain.load_state_dict(dict(engine._merged_lora_per_tensor_param()))
    assert (log_probs(plain) - trained).abs().max() < 1e-5
    assert torch.equal(log_probs(engine.module), trained)
