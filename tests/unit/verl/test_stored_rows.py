"""What a rollout carries survives a restart, whoever put it there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.verl.stored_rows import load_rows, save_rows


def again(row: Any, folder: Path) -> Any:
    save_rows([row], folder)
    return load_rows(folder)[0]


def test_what_reward_functions_return_comes_back(tmp_path: Path) -> None:
    row = again({"acc": np.float32(0.5), "hits": np.array([1, 2]), "overlong": torch.tensor(True)}, tmp_path)
    assert row["acc"] == 0.5
    assert isinstance(row["hits"], np.ndarray)
    assert row["hits"].tolist() == [1, 2]
    assert row["overlong"].dtype is torch.bool
    assert bool(row["overlong"])


def test_inputs_of_another_modality_are_tensors_again(tmp_path: Path) -> None:
    inputs = {"pixel_values": torch.randn(6, 4).bfloat16(), "image_grid_thw": torch.tensor([[1, 2, 3]])}
    row = again({"input_ids": torch.arange(3), "multi_modal_inputs": inputs, "turns": None}, tmp_path)
    assert row["turns"] is None
    assert torch.equal(row["input_ids"], torch.arange(3))
    for name, tensor in inputs.items():
        assert row["multi_modal_inputs"][name].dtype == tensor.dtype
        assert torch.equal(row["multi_modal_inputs"][name], tensor)


def test_what_is_no_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a tensor nor a JSON value: object"):
        save_rows([{"it": object()}], tmp_path)


KEYS = st.one_of(st.sampled_from(["__tensor__", "__array__", "__pairs__"]), st.text(max_size=3), st.integers())
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)


@given(st.lists(VALUES, max_size=3))
def test_any_values_come_back_whatever_their_keys_are_called(tmp_path_factory: Any, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    save_rows(rows, folder)
    assert load_rows(folder) == rows
