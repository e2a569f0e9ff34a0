"""Rows are padded and nested as verl and torch do it."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from verl.workers.utils.padding import response_to_nested

from goldilocks.verl.patches.padding import PaddedAtOnce, nested_as

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


@pytest.mark.parametrize("wider", [0, 2])
def test_padded_responses_are_nested_as_verl_nests_them(wider: int) -> None:
    mask, values = nested(torch.int64), torch.randn(4, max(LENGTHS) + wider)
    expected, found = response_to_nested(values, mask), nested_as(values, mask)
    assert torch.equal(found.values(), expected.values())
    assert torch.equal(found.offsets(), expected.offsets())
    assert torch.equal(found.to_padded_tensor(0.0), expected.to_padded_tensor(0.0))
