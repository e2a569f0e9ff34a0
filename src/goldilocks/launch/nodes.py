"""What ``goldilocks doctor`` says of each node of a Ray: its packages against most nodes', plug-in, shared folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from goldilocks.launch.finding import Finding

REMEDY = "install the same packages in the same place on every node, and give --runs a folder that all of them see"


def compare(reports: Sequence[Mapping[str, Any]], files: Mapping[str, str]) -> Iterator[Finding]:
    """Compare every node's packages with what most nodes have. ``files`` all nodes should see, each with its folder."""
    usual = _usual([report["versions"] for report in reports if "versions" in report])
    for report in reports:
        faults = [str(report["error"])] if "error" in report else [*_faults(report, usual, files)]
        what = f"node {report['address']}"
        if faults:
            yield Finding(what, False, "; ".join(faults), REMEDY)
        else:
            folders = f", sees {len(files)} shared folders" if files else ""
            yield Finding(what, True, f"same packages, plug-in live with {len(report['additions'])} additions{folders}")


def _usual(versions: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """The versions that most nodes have; where it is a draw, the node that was asked first."""
    return max(versions, key=versions.count, default={})


def _faults(report: Mapping[str, Any], usual: Mapping[str, str], files: Mapping[str, str]) -> Iterator[str]:
    yield from _other_versions(report["versions"], usual)
    if not report["additions"]:
        yield "verl there did not load the plug-in"
    for path, folder in files.items():
        if path not in report["sees"]:
            yield f"does not see {folder}"


def _other_versions(versions: Mapping[str, str], usual: Mapping[str, str]) -> Iterator[str]:
    for name in {**usual, **versions}:
        if versions.get(name) != usual.get(name):
            yield f"{name} {versions.get(name, 'missing')}, on other nodes {usual.get(name, 'missing')}"
