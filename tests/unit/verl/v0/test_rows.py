"""Rows that wait on the driver: on disk, and the timings of the calls that made them."""

from __future__ import annotations

import numpy as np
import torch

from goldilocks.types import Rollout
from goldilocks.verl.v0.backend import ProtoRow, ProtoRows


def test_rows_that_wait_survive_on_disk_field_by_field(tmp_path):
    store = ProtoRows()
    row = ProtoRow({"ids": torch.arange(3)}, {"acc": np.float64(0.5), "raw_prompt": [{"role": "user"}], "turns": None})
    store.put(("g1", 0), row)
    store.put(("g2", 3), row)
    store.save([Rollout("g2", 3, reward=0.5, tokens=3)], tmp_path / "rows")
    loaded = ProtoRows()
    loaded.load(tmp_path / "rows")
    assert len(loaded) == 1
    batch = loaded.batch([("g2", 3), ("g2", 3)])
    assert batch.batch["ids"].tolist() == [[0, 1, 2]] * 2
    assert batch.non_tensor_batch["acc"].tolist() == [0.5] * 2
    assert batch.non_tensor_batch["raw_prompt"][1] == [{"role": "user"}]
    assert batch.non_tensor_batch["uid"].tolist() == ["g2", "g2"]
