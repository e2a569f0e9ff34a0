"""``python -m goldilocks.launch.ray_probe FOLDER``: prints what the plug-in has added inside a Ray worker, as JSON.

It is a process of its own, since verl reads its environment when it is imported and a Ray that cannot start may hang.
"""

from __future__ import annotations

import json
import logging
import sys


def live_in_worker() -> list[str]:
    """Return what the plug-in adds when verl is imported; empty if it was not loaded."""
    import verl  # noqa: F401  (loads the plug-ins)

    plugin = sys.modules.get("goldilocks.verl.plugin")
    return [] if plugin is None else plugin.additions()


def main(folder: str) -> int:
    """Start a private Ray, ask one of its workers, and end it."""
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=100 << 20,
        _temp_dir=folder,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        print(json.dumps(ray.get(ray.remote(live_in_worker).remote())))
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
