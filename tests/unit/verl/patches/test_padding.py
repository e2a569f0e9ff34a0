"""Rows are padded as torch pads them."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from goldilocks.verl.patches.padding import PaddedAtOnce

LENGTHS = [3, 1, 4, 1]


def nested(dtype: torch.dtype, *, width: int = 0, lengths: list[int] = LENGTHS) -> torch.Tensor:
    """Rows of these lengths; of vectors where there is a width."""
    shapes = [(length, width) if width else (length,) for length in lengths]
    return torch.nested.as_nested_tensor([torch.randn(shape).mul(9).to(dtype) for shape in shapes], layout=torch.jagged)


@pytest.mark.parametrize("padding", [0.0, 7.0])
def test_fields_are_padded_as_torch_pads_them(padding: float) -> None:
    fields = {
        "ids": nested(torch.int64),
        "log_probs": nested(torch.float32),
        "longer": nested(torch.float32, lengths=[2, 6, 1, 3]),
        "vectors": nested(torch.float32, width=2),
        "dense": torch.arange(4),
        "texts": NonTensorStack("a", "b", "c", "d"),
    }
    plain = TensorDict(fields, batch_size=4)
    expected, found = plain.to_padded_tensor(padding), PaddedAtOnce.of(plain).to_padded_tensor(padding)
    assert found.pop("texts").tolist() == expected.pop("texts").tolist() == ["a", "b", "c", "d"]
    assert set(found.keys()) == set(expected.keys())
    for name in expected.keys():  # noqa: SIM118
        assert found[name].dtype == expected[name].dtype
        assert torch.equal(found[name], expected[name])
