from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from goldilocks.verl import plugin
from goldilocks.verl.patch import Kind


def test_verl_finds_the_plug_in_by_its_entry_point() -> None:
    found = [entry for entry in entry_points(group="verl.plugins") if entry.name == "goldilocks"]
    assert [entry.load() for entry in found] == [plugin.register]


def test_everything_is_added_once_verl_is_imported() -> None:
    patches = [patch.name for patch in plugin.PATCHES if patch.kind is not Kind.TRAINER and patch.possible]
    assert plugin.additions() == [*(addition.what for addition in plugin.ADDITIONS if addition.possible), *patches]
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    assert get_rollout_replica_class("transformers").__name__ == "TransformersReplica"
    assert get_rollout_class("transformers").__name__ == "TransformersAdapter"


@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
def test_fsdp2_has_an_engine_for_the_cpu(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine import EngineRegistry

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cpu")
    assert EngineRegistry.get_engine_cls(model_type, "fsdp2").__module__ == "goldilocks.engine.cpu.fsdp"


def test_an_addition_waits_for_the_module_it_belongs_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text("value = 1\ncopied_by_name = value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    calls: list[bool] = []
    finder = plugin._AfterImport({"late_module": [lambda: calls.append("late_module" in sys.modules)]})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert importlib.util.find_spec("late_module") is not None
    assert calls == []
    importlib.import_module("late_module")
    importlib.reload(sys.modules["late_module"])
    assert calls == [True]


def test_an_addition_that_fails_fails_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doomed_module.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = plugin.Addition("nothing", "doomed_module", "goldilocks.no_such_module")
    monkeypatch.setattr(sys, "meta_path", [plugin._AfterImport({"doomed_module": [broken.make]}), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("doomed_module")


def test_what_another_package_would_notice_is_added_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package may be installed where verl and vLLM are used without it."""
    (noticed,) = (addition for addition in plugin.ADDITIONS if addition.kind is not None)
    assert noticed.after == "vllm.plugins"
    for value, wanted in ((None, False), ("none", False), ("cpu,log-probs", False), ("all", True)):
        if value is None:
            monkeypatch.delenv("GOLDILOCKS_PATCHES", raising=False)
        else:
            monkeypatch.setenv("GOLDILOCKS_PATCHES", value)
        assert noticed.asked_for is wanted
    monkeypatch.setenv("GOLDILOCKS_PATCHES", "none")
    plugin.Addition("nothing", "any_module", "goldilocks.no_such_module", kind=Kind.SPEED).make()


def test_a_warning_that_verl_gives_for_every_rollout_is_given_once_for_a_model_type(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from verl.utils.tokenizer.continuous_token_wiring import resolve_continuous_token_model_family

    plugin.additions()
    for model_type in ("novel", "novel", "another"):
        resolve_continuous_token_model_family("auto", hf_model_type=model_type)
    warnings = [record.getMessage() for record in caplog.records if record.name.endswith("continuous_token_wiring")]
    assert ["novel" in warning for warning in warnings] == [True, False]
