"""Nested tensors padded and made for all rows at once, where verl and torch go row by row."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict


class PaddedAtOnce(TensorDict):
    """A ``TensorDict`` whose ``to_padded_tensor`` pads all rows of a field at once."""

    @classmethod
    def of(cls, fields: TensorDict) -> PaddedAtOnce:
        """The same fields."""
        return cls(dict(fields.items()), batch_size=fields.batch_size)

    def select(self, *keys: Any, inplace: bool = False, strict: bool = True) -> PaddedAtOnce:
        return PaddedAtOnce.of(super().select(*keys, inplace=inplace, strict=strict))

    def to_padded_tensor(self, padding: float = 0.0, mask_key: Any = None) -> TensorDict:
        if mask_key is not None:
            return super().to_padded_tensor(padding, mask_key)
        return TensorDict({name: padded(value, padding) for name, value in self.items()}, batch_size=self.batch_size)


def padded(value: Any, padding: float = 0.0) -> Any:
    """Pad a nested tensor to its longest row; return any other value as it is."""
    if not getattr(value, "is_nested", False):
        return value
    if value.layout != torch.jagged or value.dim() != 2 or value.lengths() is not None:
        return value.to_padded_tensor(padding)
    lengths = value.offsets().diff()
    wide = value.values().new_full((len(lengths), int(lengths.max())), padding)
    return wide.masked_scatter(_inside(wide, lengths), value.values())


def joined(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A nested tensor of rows of tokens."""
    lengths = offsets.diff()
    # Give torch the longest row: without it, a tensor is padded to the sum of all lengths.
    shortest, longest = torch.stack([lengths.min(), lengths.max()]).tolist()
    return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=shortest, max_seqlen=longest)


def _inside(wide: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A mask of the first so many columns of each row."""
    return torch.arange(wide.shape[1], device=wide.device) < lengths.unsqueeze(1)
