"""What ``goldilocks doctor`` says of the patches of verl, and which node differs from the others."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from goldilocks.cli import main
from goldilocks.engine.cpu import PATCHES_VARIABLE
from goldilocks.launch import doctor
from goldilocks.launch.doctor import compare_nodes
from goldilocks.launch.ray_probe import look
from goldilocks.verl.patch import Kind
from goldilocks.verl.patches import PATCHES
from goldilocks.verl.patches.speed import LOG_PROBS

AT_IMPORT = [patch.name for patch in PATCHES if patch.kind is not Kind.TRAINER and patch.possible_on("cpu")]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_device", lambda: "cpu")
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.delenv(PATCHES_VARIABLE, raising=False)


def test_it_names_the_live_ones() -> None:
    (finding,) = doctor.patches(["trainer goldilocks", *AT_IMPORT])
    assert finding.ok
    assert finding.detail == f"{len(AT_IMPORT)} of {len(AT_IMPORT)} live: {', '.join(AT_IMPORT)}"


def test_it_says_what_the_others_cost_and_that_is_no_failure() -> None:
    _, missing = doctor.patches([name for name in AT_IMPORT if name != LOG_PROBS.name])
    assert (missing.what, missing.ok, missing.essential) == ("log-probs", False, False)
    assert "verl's source is not the one it is for" in missing.detail
    assert LOG_PROBS.without in missing.remedy


def test_it_says_which_ones_the_user_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATCHES_VARIABLE, "cpu,speed")
    live = [patch.name for patch in PATCHES if patch.kind in (Kind.CPU, Kind.SPEED)]
    findings = list(doctor.patches(live))[1:]
    assert {finding.detail for finding in findings} == {"not live: left out by GOLDILOCKS_PATCHES=cpu,speed"}
    assert "failures-told" in {finding.what for finding in findings}


def test_quick_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "no such program"))
    assert main(["doctor", "--quick", "--runs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ok    python")
    assert "plug-in" not in said


# -- nodes -------------------------------------------------------------------------------------------------------------


FILES = {"/shared/runs/.doctor-1": "/shared/runs"}


def node(address: str, **changes: Any) -> dict[str, Any]:
    versions = {"python": "3.11.7", "verl": "0.9.1", "goldilocks-rl": "0.1.0"}
    return {"address": address, "versions": versions, "additions": ["a", "b"], "sees": list(FILES)} | changes


def details(*nodes: dict[str, Any]) -> dict[str, str]:
    """What is wrong, by node."""
    return {finding.what: finding.detail for finding in compare_nodes(nodes, FILES) if not finding.ok}


def test_nodes_that_are_alike_are_well_and_one_that_cannot_be_asked_is_named_with_its_error() -> None:
    assert details(node("10.0.0.1"), node("10.0.0.2")) == {}
    assert details(node("10.0.0.1"), {"address": "10.0.0.2", "error": "no answer"}) == {"node 10.0.0.2": "no answer"}


def test_the_node_with_other_packages_is_named_even_if_it_is_the_first() -> None:
    old = {"python": "3.11.7", "verl": "0.9.0"}
    said = "verl 0.9.0, on other nodes 0.9.1; goldilocks-rl missing, on other nodes 0.1.0"
    assert details(node("10.0.0.1", versions=old), node("10.0.0.2"), node("10.0.0.3")) == {"node 10.0.0.1": said}


def test_a_node_without_the_plugin_or_the_shared_folder_is_named() -> None:
    assert details(node("10.0.0.1"), node("10.0.0.2", additions=[]), node("10.0.0.3", sees=[])) == {
        "node 10.0.0.2": "verl there did not load the plug-in",
        "node 10.0.0.3": "does not see /shared/runs",
    }


def test_a_look_reports_versions_and_the_files_that_can_be_read(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)  # importing it takes seconds
    (tmp_path / "seen").write_text("x")
    (tmp_path / "other").write_text("y")
    files = {str(tmp_path / name): "x" for name in ("seen", "other", "missing")}
    found = look(("goldilocks-rl", "no-such-package"), files)
    assert list(found["versions"]) == ["python", "goldilocks-rl", "source of goldilocks"]
    assert found["sees"] == [str(tmp_path / "seen")]
    assert found["additions"] == []


def test_what_the_plugin_raises_where_it_looks_is_not_taken_for_no_plugin(monkeypatch: Any) -> None:
    plugin = SimpleNamespace(additions=lambda: importlib.import_module("no_such_queue"))
    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "goldilocks.verl.plugin", plugin)
    with pytest.raises(ModuleNotFoundError, match="no_such_queue"):
        look((), {})
