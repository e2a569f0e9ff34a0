"""``goldilocks doctor --address`` names the node that differs, and says in what."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from goldilocks.launch.doctor import compare_nodes
from goldilocks.launch.ray_probe import look

FILES = {"/shared/runs/.doctor-1": "/shared/runs"}


def node(address: str, **changes: Any) -> dict[str, Any]:
    versions = {"python": "3.11.7", "verl": "0.9.1", "goldilocks-rl": "0.1.0"}
    return {"address": address, "versions": versions, "additions": ["a", "b"], "sees": list(FILES)} | changes


def details(*nodes: dict[str, Any]) -> dict[str, str]:
    """What is wrong, by node."""
    return {finding.what: finding.detail for finding in compare_nodes(nodes, FILES) if not finding.ok}


def test_nodes_that_are_alike_are_well() -> None:
    assert details(node("10.0.0.1"), node("10.0.0.2")) == {}


def test_the_node_with_other_packages_is_named_even_if_it_is_the_first() -> None:
    old = {"python": "3.11.7", "verl": "0.9.0"}
    faults = details(node("10.0.0.1", versions=old), node("10.0.0.2"), node("10.0.0.3"))
    said = "verl 0.9.0, on other nodes 0.9.1; goldilocks-rl missing, on other nodes 0.1.0"
    assert faults == {"node 10.0.0.1": said}


def test_a_node_without_the_plugin_or_the_shared_folder_is_named() -> None:
    faults = details(node("10.0.0.1"), node("10.0.0.2", additions=[]), node("10.0.0.3", sees=[]))
    assert faults == {
        "node 10.0.0.2": "verl there did not load the plug-in",
        "node 10.0.0.3": "does not see /shared/runs",
    }


def test_a_node_that_cannot_be_asked_is_named_with_its_error() -> None:
    assert details(node("10.0.0.1"), {"address": "10.0.0.2", "error": "no answer"}) == {"node 10.0.0.2": "no answer"}


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
