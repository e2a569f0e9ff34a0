"""The table of patches is all that is replaced, and each stands where it was written to stand."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo import core_algos

from goldilocks.engine.cpu import DEVICES, PATCHES_VARIABLE, platform_env
from goldilocks.hashing import Sources, is_known
from goldilocks.verl import plugin
from goldilocks.verl.patch import Kind, Patch
from goldilocks.verl.patches import PATCHES, speed
from goldilocks.verl.patches.cpu import PROCESS_GROUP, trl_with_value_heads
from goldilocks.verl.plugin import ask_for, selected

plugin.additions()

NEEDED = {"process-group", "critic-attention", "trl-value-heads"}


def test_few_are_for_speed_few_sources_are_relied_upon_and_names_of_patches_and_kinds_do_not_clash() -> None:
    """Each is something that a release of verl can break: measure a new one (benchmarks/patches.py), end an old one."""
    assert sum(patch.kind is Kind.SPEED for patch in PATCHES) <= 5
    assert len({(patch.module, name) for patch in PATCHES for name in patch.written_for}) <= 40
    names = [patch.name for patch in PATCHES]
    assert len({*names, "none", "all", *(kind.value for kind in Kind)}) == len(names) + 2 + len(Kind)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_says_what_it_is_worth_and_what_would_end_it(patch: Patch) -> None:
    assert patch.replaced
    assert patch.written_for
    assert patch.without
    assert patch.needless_when


@pytest.mark.parametrize(
    ("value", "platform", "chosen"),
    [
        (None, "nvidia", set()),
        (None, "cpu", NEEDED),
        ("none", "cpu", set()),
        ("cpu", "nvidia", NEEDED),
        ("log-probs, cpu", "nvidia", NEEDED | {"log-probs"}),
        ("algorithm", "cpu", {"gspo-metrics", "largest-log-prob"}),
        ("all", "nvidia", {patch.name for patch in PATCHES}),
    ],
)
def test_the_environment_chooses(
    monkeypatch: pytest.MonkeyPatch, value: str | None, platform: str, chosen: set[str]
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", platform)
    monkeypatch.delenv(PATCHES_VARIABLE)
    if value is not None:
        monkeypatch.setenv(PATCHES_VARIABLE, value)
    assert {patch.name for patch in PATCHES if selected(patch)} == chosen


@pytest.mark.parametrize(("value", "off"), [("none", False), ("cudnn-attention", True)])
def test_cudnns_attention_is_switched_off_only_where_that_is_asked_for(value: str, off: bool) -> None:
    """In a process of its own, which loads the plug-in as verl's workers do and makes a training engine."""
    program = (
        "import torch; torch.backends.cuda.enable_cudnn_sdp(True)\n"
        "from verl.workers.engine import BaseEngine, EngineRegistry\n"
        "engine = type('Engine', (BaseEngine,), {'__init__': lambda self: None})\n"
        "EngineRegistry.register(model_type='test', backend='test', device='cpu')(engine)\n"
        "assert isinstance(EngineRegistry.new('test', 'test'), engine)\n"
        "print('off' if not torch.backends.cuda.cudnn_sdp_enabled() else 'on')"
    )
    env = {**os.environ, "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cpu", PATCHES_VARIABLE: value}
    ran = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == ("off" if off else "on")


def test_a_word_that_is_no_patch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATCHES_VARIABLE, "cpu,spede")
    with pytest.raises(ValueError, match=r"GOLDILOCKS_PATCHES='cpu,spede' is not accepted: .*speed.*log-probs"):
        selected(PATCHES[0])


@pytest.mark.parametrize("device", DEVICES)
def test_our_launchers_ask_for_all_patches_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.delenv(PATCHES_VARIABLE)
    assert platform_env(device)[PATCHES_VARIABLE] == "all"
    monkeypatch.setenv(PATCHES_VARIABLE, "none")
    assert platform_env(device)[PATCHES_VARIABLE] == "none"


def test_a_patch_for_one_platform_is_not_applied_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PROCESS_GROUP.platform == "cpu"
    for platform, possible in (("cpu", True), ("nvidia", False)):
        monkeypatch.setenv("VERL_PLATFORM", platform)
        assert PROCESS_GROUP.possible is possible


def upstream(work: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a module with this source of a function; return its name."""
    (folder / "upstream_module.py").write_text(work)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "upstream_module", raising=False)
    return "upstream_module"


def faster(module: str, known: Sources) -> Patch:
    return Patch(
        name="faster",
        kind=Kind.SPEED,
        module=module,
        replaced={"work": lambda _: lambda: "ours"},
        written_for={"work": known},
        reason="slow",
        changes="nothing",
        without="slow",
        needless_when="fast",
    )


RELEASES = ("def work():\n    return 'of one release'\n", "def work():\n    return 'of another'\n")


@pytest.mark.parametrize("source", RELEASES)
def test_a_function_may_have_the_source_of_any_release_that_the_patch_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    known = tuple(hashlib.sha256(one.encode()).hexdigest()[:16] for one in RELEASES)
    patch = faster(upstream(source, tmp_path, monkeypatch), known)
    assert patch.apply()
    assert importlib.import_module(patch.module).work() == "ours"


REPLACED = [(patch, path) for patch in PATCHES for path in patch.replaced if path in patch.written_for]


@pytest.mark.parametrize(("patch", "path"), REPLACED, ids=lambda value: getattr(value, "name", value))
def test_what_takes_the_place_of_a_function_tells_which_one_it_was(
    patch: Patch, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is known whether or not the patch was applied in this process before."""
    losses = dict(core_algos.POLICY_LOSS_REGISTRY)  # a loss is registered when its replacement is made
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", losses)
    if patch.needs and not patch.possible:
        pytest.skip(f"{patch.needs} is not installed")
    function = functools.reduce(getattr, path.split("."), importlib.import_module(patch.module))
    assert is_known(patch.replaced[path](function), patch.written_for[path])


def test_what_is_gone_has_changed_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A function, the whole module, or another attribute that would be replaced: nothing is, and nothing raises."""
    module = upstream(RELEASES[0], tmp_path, monkeypatch)
    known = hashlib.sha256(RELEASES[0].encode()).hexdigest()[:16]
    patch = faster(module, known)
    assert not dataclasses.replace(patch, replaced={**patch.replaced, "helper": lambda _: None}).apply()
    assert importlib.import_module(module).work() == "of one release"
    assert not dataclasses.replace(patch, written_for={"work": known, "Class.method": known}).apply()
    assert not faster("module_that_is_gone", known).apply()
    assert patch.apply()


OTHERWISE = {
    "a function that changed": "def work():\n    return 'rewritten upstream'\n",
    "a partial": "import functools\nwork = functools.partial(print, 1)\n",
    "a builtin": "work = len\n",
    "a property": "work = property(lambda self: 1)\n",
    "a function without source": "exec('def work(): return 1')\n",
    "a module that cannot import": "from functools import name_that_is_gone\n",
    "a module without its library": "raise OSError('libcuda.so: cannot open shared object file')\n",
}


@pytest.mark.parametrize("source", OTHERWISE.values(), ids=OTHERWISE)
def test_what_has_another_source_or_none_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    patch = faster(upstream(source, tmp_path, monkeypatch), "0" * 16)
    with caplog.at_level(logging.WARNING):
        assert not patch.apply()
    assert "upstream_module.work has changed; the patch faster is skipped" in caplog.text


@pytest.mark.parametrize(("folder", "available"), [("trl/experimental/ppo", True), ("trl/experimental", False)])
def test_verl_uses_trl_only_where_trl_has_value_heads(
    folder: str, available: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "trl" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    assert trl_with_value_heads(lambda: True)() is available
    assert trl_with_value_heads(lambda: False)() is False


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
        patched.setattr(speed, "LOGITS_PER_BLOCK", block)
        ours, our_gradient = _with_gradient(speed.log_probs_of, logits, labels)
    theirs, their_gradient = _with_gradient(original, logits, labels)
    assert torch.equal(ours, theirs)
    assert torch.equal(our_gradient, their_gradient)


def _with_gradient(function: Any, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    out = function(leaf, labels)
    out.sum().backward()
    assert leaf.grad is not None
    return out.detach(), leaf.grad


ALONE = """
import os, socket, torch
from verl.utils import distributed

with socket.socket() as taken:
    taken.bind(("", 0))
    taken.listen()
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]))
    distributed.initialize_global_process_group_ray()
print(torch.distributed.get_backend(), torch.distributed.get_world_size())
"""


def test_a_worker_that_is_alone_starts_although_its_port_was_taken_meanwhile() -> None:
    run = [sys.executable, "-c", ALONE]
    found = subprocess.run(run, env=os.environ | platform_env("cpu"), capture_output=True, text=True, check=False)
    assert found.stdout.split()[-2:] == ["cpu:gloo", "1"], found.stderr[-2000:]


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


@pytest.mark.parametrize("kind", Kind)
def test_an_object_of_ours_asks_for_patches_without_importing_an_engine_that_is_not_there(kind: Kind) -> None:
    before = set(sys.modules)
    ask_for(kind)
    assert not {patch.module for patch in PATCHES if patch.needs} & (set(sys.modules) - before)
