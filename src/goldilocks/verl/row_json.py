"""What a rollout carries beside its tensors, as JSON."""

from __future__ import annotations

import json
from typing import Any


def dump_values(values: Any) -> str:
    """The text; a ``ValueError`` names what is neither a tensor nor a JSON value."""
    try:
        return json.dumps(values, default=_plain)
    except TypeError as error:
        raise ValueError(f"a rollout has a field that is neither a tensor nor a JSON value: {error}") from error


def _plain(value: object) -> Any:
    if hasattr(value, "tolist"):  # arrays, their scalars, and tensors: verl's DAPO reward manager returns some
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise TypeError(f"{type(value).__name__} {value!r:.80}")
