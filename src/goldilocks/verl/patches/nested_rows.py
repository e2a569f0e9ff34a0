"""verl's operations on rows of different lengths, for all rows at once: no Python loop and no GPU wait per row."""

from __future__ import annotations

import functools
from typing import Any

from goldilocks.verl.patch import Function, Kind, Patch


def select_rows_at_once(original: Function) -> Function:
    """Select rows of tokens directly from their values; other shapes are left to verl."""

    @functools.wraps(original)
    def index_select_tensor_dict(batch: Any, indices: Any) -> Any:
        import torch

        if batch is None or not len(indices):
            return original(batch, indices)
        indices = torch.as_tensor(indices)
        ragged = {key: value for key, value in batch.items() if _is_rows_of_tokens(value)}
        selected = original(batch.exclude(*ragged), indices)
        for key, rows in ragged.items():
            selected[key] = _select(rows, indices)
        return selected

    return index_select_tensor_dict


def _is_rows_of_tokens(value: Any) -> bool:
    import torch

    jagged = isinstance(value, torch.Tensor) and value.is_nested and value.layout == torch.jagged
    return jagged and value.dim() == 2 and value.lengths() is None


def _select(rows: Any, indices: Any) -> Any:
    import torch

    offsets = rows.offsets()
    indices = indices.to(offsets.device)
    lengths = offsets.diff()[indices]
    ends = lengths.cumsum(0)
    shortest, longest, total = torch.stack([lengths.min(), lengths.max(), ends[-1]]).tolist()
    shifts = offsets[:-1][indices] - (ends - lengths)
    places = torch.arange(total, device=offsets.device) + shifts.repeat_interleave(lengths, output_size=total)
    # Give torch the longest row: without it, a tensor is padded to the sum of all lengths.
    return torch.nested.nested_tensor_from_jagged(
        rows.values()[places], torch.cat([offsets[:1], ends]), min_seqlen=shortest, max_seqlen=longest
    )


def responses_padded_at_once(original: Function) -> Function:
    """All rows are gathered at once, where verl cuts and pads each of them, and its gradient, by itself."""

    @functools.wraps(original)
    def no_padding_2_padding(tensor: Any, data: Any) -> Any:
        import torch
        from verl.utils import tensordict_utils as tu

        if not data["prompts"].is_nested or (tensor.values() if tensor.is_nested else tensor).dim() != 1:
            return original(tensor, data)
        values = tensor.values() if tensor.is_nested else tensor
        lengths = data["responses"].offsets().diff()
        ends = (data["prompts"].offsets().diff() + lengths).cumsum(0)
        width = tu.get_non_tensor_data(data, "max_response_len", -1)
        columns = torch.arange(width if width >= 0 else int(lengths.max()), device=values.device)
        # what the model says of a token it says at the token before
        places = (ends - lengths - 1).unsqueeze(1) + columns
        inside = columns < lengths.unsqueeze(1)
        return torch.where(inside, values[places.where(inside, 0)], 0)

    return no_padding_2_padding


def one_partition_is_all(original: Function) -> Function:
    """Return all rows if there is one worker or one micro-batch: balancing them has no effect."""

    @functools.wraps(original)
    def get_seqlen_balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
        if k_partitions == 1 and len(seqlen_list):
            return [list(range(len(seqlen_list)))]
        return original(seqlen_list, k_partitions, equal_size)

    return get_seqlen_balanced_partitions


LOSS_PADDING = Patch(
    name="loss-padding",
    kind=Kind.SPEED,
    module="verl.workers.utils.losses",
    replaced={"no_padding_2_padding": responses_padded_at_once},
    written_for={"no_padding_2_padding": "0868d5c4731b66ac"},
    reason="verl cuts and pads each row, and each row's gradient, by itself",
    changes="nothing: the same values",
    without="CPU +1 % (-2 to +2)",
    needless_when="verl pads all rows at once",
)

ROW_SELECTION = Patch(
    name="row-selection",
    kind=Kind.SPEED,
    module="verl.utils.tensordict_utils",
    replaced={"index_select_tensor_dict": select_rows_at_once},
    written_for={"index_select_tensor_dict": "ecca58fdcf80a3ed"},
    reason="verl unbinds a nested tensor into its rows; these are picked at once",
    changes="nothing: the same values",
    without="CPU 0 % (-3 to +3), +4 % (0 to +6) with a pass for old_log_probs",
    needless_when="verl picks rows by their offsets",
)

ONE_PARTITION = Patch(
    name="one-partition",
    kind=Kind.SPEED,
    module="verl.utils.seqlen_balancing",
    replaced={"get_seqlen_balanced_partitions": one_partition_is_all},
    written_for={"get_seqlen_balanced_partitions": "5a3d752e6c5d5734"},
    reason="to balance rows over one worker verl compares all of them, and ends with all of them in order",
    changes="nothing: the same values",
    without="CPU +14 % (+9 to +19)",
    needless_when="verl returns all rows where there is one partition",
)
