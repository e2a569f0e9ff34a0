"""A GGUF file: its metadata, and its tensors as fp32.

The package ``gguf`` reads metadata as one NumPy slice of a memory map per token: eleven seconds for a vocabulary of
49,152 and its merges, and transformers reads the file anew for the tokenizer (twice), the config and the weights. This
reader takes 0.3 s. The arithmetic of the quantised types is the package's own.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32  # of the tensors, unless the metadata say otherwise


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in the file; ``shape`` is in PyTorch's order, slowest dimension first."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """``metadata`` by key, ``tensors`` by name; ``tensor(name)`` dequantises one."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._place = len(MAGIC)
        version = self._number("I") if self._bytes[: len(MAGIC)] == MAGIC else 0
        if version not in VERSIONS:
            raise ValueError(f"{path} is not a GGUF file of version {' or '.join(map(str, VERSIONS))}")
        tensors, entries = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {self._string(): self._value(self._number("I")) for _ in range(entries)}
        self.tensors = dict(self._stored() for _ in range(tensors))
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        self._data = -(-self._place // alignment) * alignment

    def tensor(self, name: str) -> np.ndarray:
        """The tensor in fp32."""
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        stored = self.tensors[name]
        kind = GGMLQuantizationType(stored.kind)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        *rows, width = stored.shape
        shape = (*rows, width // block * block_bytes)
        start = self._data + stored.offset
        raw = np.frombuffer(self._bytes, np.uint8, count=int(np.prod(shape)), offset=start).reshape(shape)
        values = dequantize(raw.view(_PLAIN[kind.name]) if kind.name in _PLAIN else raw, kind)
        return values.astype(np.float32, copy=False).reshape(stored.shape)

    def _number(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self._bytes, self._place)[0]
        self._place += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._number("Q")
        start, self._place = self._place, self._place + length
        return self._bytes[start : self._place].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            return [self._value(inner) for _ in range(count)]
        return self._number(_NUMBERS[kind])

    def _stored(self) -> tuple[str, Stored]:
        name, dimensions = self._string(), self._number("I")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, Stored(shape, self._number("I"), self._number("Q"))


_PLAIN = {"F32": "<f4", "F16": "<f2"}  # types the package wants as numbers and not as bytes
