"""Rows that fill a batch up for the workers, which split it evenly.

The batch that ``fit`` holds is never padded: it is filled up on its way to the workers, and what comes back is cut.
"""

from __future__ import annotations

import numpy as np
from verl import DataProto

from goldilocks.filtering.padding import PADDING_UID, ZEROED


def pad_to(batch: DataProto, divisor: int) -> DataProto:
    """Fill the batch up at its end with rows that have the shortest row's prompt, an empty response and zero masks."""
    missing = -len(batch) % divisor
    if not missing:
        return batch
    template = int(batch.batch["attention_mask"].sum(-1).argmin())
    padding = batch.select_idxs([template] * missing)
    padding.batch = padding.batch.clone()
    for name in set(ZEROED) & set(padding.batch.keys()):
        padding.batch[name].zero_()
    padding.batch["attention_mask"][:, -padding.batch["responses"].shape[1] :] = 0
    padding.non_tensor_batch["uid"] = np.array([f"{PADDING_UID}{place}" for place in range(missing)], dtype=object)
    return DataProto.concat([batch, padding])
