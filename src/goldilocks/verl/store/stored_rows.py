"""Pictures as bytes, and back, pixel by pixel. Only pixels are kept: no metadata, no file format.

Rows of rollouts on disk: tensors, arrays and bytes as safetensors, the rest as JSON. Loading executes no code.

A row is any nesting of dicts and lists. A tensor comes back as a tensor, an array of numbers as an array, bytes as
bytes and a picture as a picture, however deep it was. Bytes that several rows have, such as the picture of their
prompt, are stored once. What is none of these and no JSON value cannot be saved, and the error names it.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AS_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")  # the modes that a PNG file keeps as they are


def is_picture(value: object) -> bool:
    """Whether this is an image of PIL. Where PIL was never imported, nothing is."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def as_png(image: Any) -> bytes | None:
    """Return the file of a picture; None if PNG does not keep its mode as it is."""
    if image.mode not in AS_PNG:
        return None
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def from_png(data: bytes) -> Any:
    """Return the picture of a file that ``as_png`` wrote; no other format is opened."""
    from PIL import Image

    image = Image.open(io.BytesIO(data), formats=("PNG",))
    image.load()
    return image


def from_pixels(mode: str, size: tuple[int, int], pixels: bytes) -> Any:
    """Return the picture whose ``tobytes`` are these."""
    from PIL import Image

    return Image.frombytes(mode, size, pixels)


TENSORS, VALUES = "tensors.safetensors", "values.json"
# What stands in the JSON for what it cannot hold.
TENSOR, ARRAY, PAIRS = "__tensor__", "__array__", "__pairs__"
BYTES, PNG, PIXELS = "__bytes__", "__png__", "__pixels__"

Tensors = dict[str, torch.Tensor]


def save_rows(rows: Sequence[Any], folder: Path) -> None:
    """Write the rows into the folder."""
    tensors: Tensors = {}
    text = json.dumps([_to_json(row, tensors) for row in rows])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS)
    (folder / VALUES).write_text(text)


def load_rows(folder: Path) -> list[Any]:
    """Return what ``save_rows`` wrote."""
    tensors = load_file(folder / TENSORS)
    return [_from_json(row, tensors) for row in json.loads((folder / VALUES).read_text())]


def _to_json(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, torch.Tensor):
        return {TENSOR: _store(value, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {ARRAY: _store(torch.from_numpy(np.ascontiguousarray(value)), tensors)}
    if isinstance(value, Mapping):
        return _mapping_to_json(value, tensors)
    if isinstance(value, (list, tuple)):
        return [_to_json(item, tensors) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {BYTES: _store_bytes(value, tensors)}
    if is_picture(value):
        return _picture_to_json(value, tensors)
    return _to_json(_plain(value), tensors)


def _mapping_to_json(value: Mapping[Any, Any], tensors: Tensors) -> Any:
    """JSON has text keys only, and a key of the user's may be one of our marks."""
    if all(isinstance(key, str) and key not in _MARKS for key in value):
        return {key: _to_json(item, tensors) for key, item in value.items()}
    return {PAIRS: [[_to_json(key, tensors), _to_json(item, tensors)] for key, item in value.items()]}


def _picture_to_json(image: Any, tensors: Tensors) -> Any:
    png = as_png(image)
    if png is not None:
        return {PNG: _store_bytes(png, tensors)}
    return {PIXELS: [image.mode, image.size, _store_bytes(image.tobytes(), tensors)]}


def _store_bytes(data: bytes | bytearray, tensors: Tensors) -> str:
    """Store bytes under a name that is a function of them; a tensor's name is a number."""
    name = f"bytes-{hashlib.blake2b(data, digest_size=16).hexdigest()}"
    if name not in tensors:
        tensors[name] = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
    return name


def _store(tensor: torch.Tensor, tensors: Tensors) -> str:
    name = str(len(tensors))
    tensors[name] = tensor.detach().cpu().contiguous().clone()
    return name


def _plain(value: Any) -> Any:
    """Return what stands for an object of a library: an array, a number, the fields of a model."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise ValueError(
        "a rollout has a field that is neither a tensor nor a JSON value, and neither bytes nor a picture: "
        f"{type(value).__name__} {value!r:.80}"
    )


def _from_json(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value)) if len(value) == 1 else None
    if mark in _MARKS:
        return _MARKS[mark](value[mark], tensors)
    return {key: _from_json(item, tensors) for key, item in value.items()}


def _bytes(name: str, tensors: Tensors) -> bytes:
    return tensors[name].numpy().tobytes()


_MARKS: dict[str, Callable[[Any, Tensors], Any]] = {
    TENSOR: lambda name, tensors: tensors[name],
    ARRAY: lambda name, tensors: tensors[name].numpy(),
    BYTES: _bytes,
    PNG: lambda name, tensors: from_png(_bytes(name, tensors)),
    PIXELS: lambda about, tensors: from_pixels(about[0], tuple(about[1]), _bytes(about[2], tensors)),
    PAIRS: lambda pairs, tensors: {_from_json(key, tensors): _from_json(item, tensors) for key, item in pairs},
}
