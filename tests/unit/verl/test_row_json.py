"""What a rollout carries beside its tensors survives a restart, whoever put it there."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from goldilocks.verl.row_json import dump_values


def test_what_reward_functions_return_becomes_plain_json() -> None:
    values = {
        "acc": np.float32(0.5),
        "hits": np.array([1, 2]),
        "overlong_reward": torch.tensor(-0.25),
        "overlong": torch.tensor(True),
        "note": "ok",
    }
    plain = {"acc": 0.5, "hits": [1, 2], "overlong_reward": -0.25, "overlong": True, "note": "ok"}
    assert json.loads(dump_values(values)) == plain


def test_what_is_no_value_is_named() -> None:
    with pytest.raises(ValueError, match="neither a tensor nor a JSON value: object"):
        dump_values({"it": object()})
