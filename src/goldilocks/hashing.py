"""Hashes that are the same in every process and on every machine: of seeds, of prompts, of source code."""

from __future__ import annotations

import hashlib
import inspect
import json
from typing import Any

Sources = str | tuple[str, ...]  # the digest of a source, or of each that a supported release has


def hashed(*parts: object) -> int:
    """Return a hash of 63 bits: a seed that every engine accepts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def digest(function: Any) -> str:
    """Return a short fingerprint of the source of a function or class, beneath its decorators."""
    return hashlib.sha256(inspect.getsource(inspect.unwrap(function)).encode()).hexdigest()[:16]


def is_known(function: Any, sources: Sources) -> bool:
    """Return whether a function or class has one of these sources."""
    return digest(function) in ((sources,) if isinstance(sources, str) else sources)


def content_key(content: object) -> int:
    """Return a hash of 64 bits of a prompt's content: the same in every process, epoch and restart."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
