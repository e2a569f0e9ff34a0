"""A fingerprint of a function of another package: what was written for one source is not silently used with another."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any


def digest(function: Any) -> str:
    """Return a short fingerprint of the source of a function or class; what a decorator hides is looked up."""
    return hashlib.sha256(inspect.getsource(inspect.unwrap(function)).encode()).hexdigest()[:16]
