from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goldilocks.verl import plugin
from goldilocks.verl.patches import table as patches
from goldilocks.verl.patches.patch import Patch, digest
from goldilocks.verl.patches.table import PATCHES

plugin.additions()


def _in_verl(patch: Patch) -> Any:
    return functools.reduce(getattr, patch.name.split("."), importlib.import_module(patch.module))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_verl_still_has_the_function_the_patch_was_written_for(patch: Patch) -> None:
    """Fails when verl changes it: read the new source, mend the patch, and write down its new digest."""
    assert digest(inspect.unwrap(_in_verl(patch))) == patch.source_digest


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_patch_is_in_place(patch: Patch) -> None:
    assert _in_verl(patch).__code__.co_filename.startswith(str(Path(plugin.__file__).parent))


def test_a_function_that_changed_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "upstream_module.py").write_text("def work():\n    return 'rewritten upstream'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    patch = Patch("faster work", "upstream_module", "work", "0" * 16, lambda original: lambda: "ours")
    with caplog.at_level(logging.WARNING):
        patch.apply()
    assert importlib.import_module("upstream_module").work() == "rewritten upstream"
    assert "faster work" in caplog.text


@pytest.mark.parametrize(("folder", "available"), [("trl/experimental/ppo", True), ("trl/experimental", False)])
def test_verl_uses_trl_only_where_trl_has_value_heads(
    folder: str, available: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "trl" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    is_trl_available = patches.trl_with_value_heads(lambda: True)
    assert is_trl_available() is available
    assert patches.trl_with_value_heads(lambda: False)() is False


@given(
    rows=st.integers(1, 40),
    vocabulary=st.integers(2, 300),
    block=st.integers(1, 4000),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    nested=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_log_probs_and_their_gradient_are_exactly_verls(
    rows: int, vocabulary: int, block: int, dtype: torch.dtype, nested: bool, seed: int
) -> None:
    original = inspect.unwrap(importlib.import_module("verl.utils.torch_functional").logprobs_from_logits_v2)
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, 3) if nested else (rows,)
    logits = (torch.randn(*shape, vocabulary, generator=generator) * 5).to(dtype)
    labels = torch.randint(0, vocabulary, shape, generator=generator)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patches, "LOGITS_PER_BLOCK", block)
        ours, our_gradient = _with_gradient(patches.logprobs_by_blocks(original), logits, labels)
    theirs, their_gradient = _with_gradient(original, logits, labels)
    assert torch.equal(ours, theirs)
    assert torch.equal(our_gradient, their_gradient)


def _with_gradient(function: Any, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    out = function(leaf, labels)
    out.sum().backward()
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def test_a_critic_gets_the_attention_its_config_names(tmp_path: Path) -> None:
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
    from verl.utils.model import load_valuehead_model

    shape = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    language_model = LlamaForCausalLM(shape)
    language_model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation="sdpa", num_labels=1)
    critic = load_valuehead_model(str(tmp_path), torch.float32, config, trust_remote_code=False)
    assert critic.config._attn_implementation == "sdpa"
    assert critic(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 1)
    assert torch.equal(critic.model.embed_tokens.weight, language_model.model.embed_tokens.weight)
