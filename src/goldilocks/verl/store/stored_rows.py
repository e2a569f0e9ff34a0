"""Rows of rollouts on disk: tensors, arrays, bytes and pictures as safetensors, the rest as JSON. Loading runs no code.

A row is any nesting of dicts and lists. A tensor comes back as a tensor, an array of numbers as an array, bytes as
bytes and a picture as a picture, pixel by pixel. Bytes and large tensors that several rows have, such as the picture of
their prompt, are stored once. Any other value cannot be saved, and the error names it.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from goldilocks.runs.checkpoints import ARRAY, from_json, to_json

FILE_OF_TENSORS, FILE_OF_VALUES = "tensors.safetensors", "values.json"
TENSOR, BYTES, PNG, PIXELS = "__tensor__", "__bytes__", "__png__", "__pixels__"
SHARED = 1 << 14  # bytes of a tensor that rows may have in common; answers of usual lengths are smaller
AS_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")  # the modes that a PNG file keeps as they are


def save_rows(rows: Sequence[Any], folder: Path) -> None:
    """Write the rows into the folder."""
    stored = _Stored({})
    text = json.dumps(to_json(rows, stored.put, stored.marks))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored.tensors, folder / FILE_OF_TENSORS)
    (folder / FILE_OF_VALUES).write_text(text)


def load_rows(folder: Path) -> list[Any]:
    """Return what ``save_rows`` wrote."""
    stored = _Stored(load_file(folder / FILE_OF_TENSORS))
    return list(from_json(json.loads((folder / FILE_OF_VALUES).read_text()), stored.marks))


class _Stored:
    """The values that JSON lacks, each a tensor with a name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.marks: dict[str, Callable[[Any], Any]] = {
            TENSOR: tensors.__getitem__,
            ARRAY: lambda name: tensors[name].numpy(),
            BYTES: self._bytes,
            PNG: lambda name: _from_png(self._bytes(name)),
            PIXELS: lambda about: _from_pixels(about[0], tuple(about[1]), self._bytes(about[2])),
        }

    def put(self, value: Any) -> Any:
        """Store a value and return the JSON that stands for it."""
        if isinstance(value, torch.Tensor):
            return {TENSOR: self._put_tensor(value)}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {ARRAY: self._put_tensor(torch.from_numpy(np.ascontiguousarray(value)))}
        if isinstance(value, (bytes, bytearray)):
            return {BYTES: self._put_bytes(value)}
        if _is_picture(value) and value.mode in AS_PNG:
            return {PNG: self._put_bytes(_as_png(value))}
        if _is_picture(value):
            return {PIXELS: [value.mode, value.size, self._put_bytes(value.tobytes())]}
        return to_json(_plain(value), self.put, self.marks)

    def _put_tensor(self, tensor: torch.Tensor) -> str:
        """Store a large tensor under a name that is a function of it; the name of any other is a number."""
        whole, name = tensor.detach().cpu().contiguous(), str(len(self.tensors))
        if whole.nbytes >= SHARED:
            name = f"{whole.dtype}-{list(whole.shape)}-{_digest(whole.flatten().view(torch.uint8).numpy().data)}"
        if name not in self.tensors:
            self.tensors[name] = whole.clone()
        return name

    def _put_bytes(self, data: bytes | bytearray) -> str:
        """Store bytes under a name that is a function of them."""
        name = f"bytes-{_digest(data)}"
        if name not in self.tensors:
            self.tensors[name] = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        return name

    def _bytes(self, name: str) -> bytes:
        return self.tensors[name].numpy().tobytes()


def _digest(data: bytes | bytearray | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Return the plain form of a library's object: an array, a number, the fields of a model."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise ValueError(
        "a rollout has a field that is neither a tensor nor a JSON value, and neither bytes nor a picture: "
        f"{type(value).__name__} {value!r:.80}"
    )


def _is_picture(value: object) -> bool:
    """Whether this is an image of PIL. Where PIL was never imported, nothing is."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def _as_png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _from_png(data: bytes) -> Any:
    """Return the picture of a file that ``_as_png`` wrote; no other format is opened."""
    from PIL import Image

    image = Image.open(io.BytesIO(data), formats=("PNG",))
    image.load()
    return image


def _from_pixels(mode: str, size: tuple[int, int], pixels: bytes) -> Any:
    """Return the picture whose ``tobytes`` are these."""
    from PIL import Image

    return Image.frombytes(mode, size, pixels)
