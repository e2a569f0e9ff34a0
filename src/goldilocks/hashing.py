"""Hashes that are the same in every process and on every machine: of prompts, of source code."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

Sources = str | tuple[str, ...]  # the digest of a source, or of each that a supported release has

# The keys of verl's ``data`` that name what prompts have beside text, and the columns that they name by default.
MEDIA = {"image_key": "images", "video_key": "videos", "audio_key": "audios"}


@functools.cache
def digest(function: Any) -> str:
    """Return a short fingerprint of the source of a function or class, beneath its decorators."""
    return hashlib.sha256(inspect.getsource(inspect.unwrap(function)).encode()).hexdigest()[:16]


def is_known(function: Any, sources: Sources) -> bool:
    """Return whether a function or class has one of these sources; a builtin or a partial has none."""
    try:
        return digest(function) in ((sources,) if isinstance(sources, str) else sources)
    except (OSError, TypeError):
        return False


def content_key(content: object) -> int:
    """Return a hash of 64 bits of a prompt's content: the same in every process, epoch and restart."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=_written)
    written = text.encode("utf-8", "surrogatepass")  # a JSON file can hold half a surrogate pair
    return int.from_bytes(hashlib.blake2b(written, digest_size=8).digest(), "little")


def with_media(messages: object, media: Sequence[Any]) -> object:
    """Return the content of a prompt with images, films or sounds: two prompts may differ in these alone.

    ``media`` are as a data set stores them: files, paths or decoded images, and lists of these.
    """
    keys = [_media_key(one) for one in media]
    return [messages, *keys] if any(keys) else messages


def _media_key(media: Any) -> Any:
    if isinstance(media, Mapping):
        stored = media.get("bytes") or media.get("path")
        return _media_key(stored or sorted((name, _media_key(one)) for name, one in media.items()))
    if isinstance(media, list | tuple):
        return [_media_key(one) for one in media]
    if isinstance(media, str | int | float | None):
        return media
    array = media.numpy() if hasattr(media, "numpy") else media  # ``str`` of an array or a tensor leaves numbers out
    return _written(array.tobytes() if hasattr(array, "shape") else array)


def _written(value: Any) -> Any:
    """Return JSON for a value that has none; an image and bytes are their hash: ``str`` of an image has its address."""
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=8).hexdigest()
    is_image = hasattr(value, "tobytes") and hasattr(value, "mode")
    return [value.mode, list(value.size), _written(value.tobytes())] if is_image else str(value)
