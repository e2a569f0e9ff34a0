"""Seeds of sampling noise: hashes of what names a rollout, so that the same rollout always gets the same noise."""

from __future__ import annotations

import hashlib


def hashed(*parts: object) -> int:
    """63 bits: a seed that every engine accepts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
