"""Keys and values of every slot at fixed addresses, and the two windows a model sees them through.

A slot is a row of every layer's tensors; column t of the row belongs to the token at position t. Nothing is ever
appended or reallocated while the store is held, so a captured CUDA graph stays valid.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from goldilocks.errors import require


class KVStore:
    """``keys`` and ``values`` hold one ``[slots, heads, length, head size]`` tensor per layer.

    Those of one shape are views of one tensor, so that rows of all layers are copied by one operation.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int, int]],
        slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        wanted = [(heads, key) for heads, key, _ in shapes] + [(heads, value) for heads, _, value in shapes]
        self._stacks = {
            (heads, size): torch.zeros(count, slots, heads, length, size, dtype=dtype, device=device)
            for (heads, size), count in Counter(wanted).items()
        }
        views = {shape: iter(stack) for shape, stack in self._stacks.items()}
        tensors = [next(views[shape]) for shape in wanted]
        self.keys, self.values = tensors[: len(shapes)], tensors[len(shapes) :]

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` columns of the rows ``source`` into the rows ``target``; the two may overlap."""
        for stack in self._stacks.values():
            stack[:, target, :, :length] = stack[:, source, :, :length]


class _Window(Cache):
    """A cache as transformers sees it; subclasses decide where new keys go and which keys are attended."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        return 0


class ProbeWindow(_Window):
    """Stores nothing and records ``(heads, key size, value size)`` of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        known = len(self.shapes)
        require(layer_idx == known, "layer", layer_idx, f"{known}: layers that run in order, once each")
        self.shapes.append((key_states.shape[1], key_states.shape[3], value_states.shape[3]))
        return key_states, value_states


class PrefillWindow(_Window):
    """Prompts from position 0 on, written to the slots ``rows``; the prompt attends to itself."""

    def __init__(self, store: KVStore, rows: Tensor) -> None:
        super().__init__()
        self.store, self.rows = store, rows

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        length = key_states.shape[2]
        self.store.keys[layer_idx][self.rows, :, :length] = key_states
        self.store.values[layer_idx][self.rows, :, :length] = value_states
        return key_states, value_states


class DecodeWindow(_Window):
    """One token for each of the first slots, written at ``columns``; the first ``extent`` columns are attended."""

    def __init__(self, store: KVStore, rows: Tensor, columns: Tensor, extent: int) -> None:
        super().__init__()
        self.store, self.rows, self.columns, self.extent = store, rows, columns, extent

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        keys, values = self.store.keys[layer_idx], self.store.values[layer_idx]
        keys[self.rows, :, self.columns] = key_states[:, :, 0]
        values[self.rows, :, self.columns] = value_states[:, :, 0]
        count = len(self.rows)
        return keys[:count, :, : self.extent], values[:count, :, : self.extent]


class KernelWindow(_Window):
    """A ``DecodeWindow`` on a GPU: the attention kernel reads only the columns that a row has."""

    def __init__(self, store: KVStore, columns: Tensor) -> None:
        super().__init__()
        self.store, self.columns = store, columns

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        from goldilocks.engine import kernels  # needs Triton, which only comes with a CUDA build of torch

        keys, values = self.store.keys[layer_idx], self.store.values[layer_idx]
        kernels.write(key_states, value_states, keys, values, self.columns)
        return keys, values
