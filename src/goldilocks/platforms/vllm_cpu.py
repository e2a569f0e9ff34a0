"""vLLM without a GPU as verl's rollout engine: vLLM loads this in each of its processes (``vllm.general_plugins``).

oneDNN packs the weights of a linear layer when they are first loaded and drops the originals, so new weights cannot be
loaded into it. Without packing they can. Only on verl's platform ``cpu``: any other vLLM is left as it is.
"""

from __future__ import annotations

import os


def register() -> None:
    """Switch oneDNN's packing off."""
    if os.environ.get("VERL_PLATFORM") == "cpu":
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False
