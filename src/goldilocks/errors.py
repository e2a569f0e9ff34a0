"""One form for every message to a user: the key, its value, and what would be accepted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def require(condition: bool, key: str, value: object, accepted: str) -> None:
    """Raise a ``ValueError`` that names the key, the value and what is accepted, unless the condition holds."""
    if not condition:
        raise ValueError(f"{key}={value!r} is not accepted: {accepted}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean …?)`` for the known word closest to ``word``, or an empty string if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
