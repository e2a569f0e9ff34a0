"""verl's operations on rows of different lengths, for all rows at once: no Python loop and no GPU wait per row."""

from __future__ import annotations

import functools
from typing import Any

from goldilocks.verl.patches.patch import Function, Kind, Patch


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


def responses_at_once(original: Function) -> Function:
    """Read the offsets once; verl reads them, and waits for the GPU, for every row."""

    @functools.wraps(original)
    def response_from_nested(tensor: Any, response_mask: Any) -> Any:
        import torch

        values, ends = tensor.values(), tensor.offsets()[1:].tolist()
        lengths = response_mask.offsets().diff().tolist()
        # the log-prob of a token is computed at the token before it
        rows = [values[end - length - 1 : end - 1] for end, length in zip(ends, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return response_from_nested


def padded_at_once(original: Function) -> Function:
    """Do as ``responses_at_once``, for a padded tensor."""

    @functools.wraps(original)
    def response_to_nested(tensor: Any, response_mask: Any) -> Any:
        import torch

        lengths = response_mask.offsets().diff().tolist()
        rows = [row[:length] for row, length in zip(tensor.unbind(), lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return response_to_nested


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
    "loss-padding",
    Kind.SPEED,
    "verl.workers.utils.losses",
    {"no_padding_2_padding": responses_padded_at_once},
    {"no_padding_2_padding": "0868d5c4731b66ac"},
    "verl cuts and pads each row, and each row's gradient, by itself",
    "nothing: the same values",
    "CPU -1 % (-3 to +3)",
    "verl pads all rows at once",
)

ROW_SELECTION = Patch(
    "row-selection",
    Kind.SPEED,
    "verl.utils.tensordict_utils",
    {"index_select_tensor_dict": select_rows_at_once},
    {"index_select_tensor_dict": "ecca58fdcf80a3ed"},
    "verl unbinds a nested tensor into its rows; these are picked at once",
    "nothing: the same values",
    "CPU +3 % (-1 to +4)",
    "verl picks rows by their offsets",
)

NESTED_RESPONSES = Patch(
    "nested-responses",
    Kind.SPEED,
    "verl.workers.utils.padding",
    {"response_from_nested": responses_at_once},
    {"response_from_nested": "41a4bf54aa981c09"},
    "verl reads a number from the device for every row; the offsets are read once",
    "nothing: the same values",
    "CPU +2 % (-2 to +5)",
    "verl reads the offsets once",
)

PADDED_RESPONSES = Patch(
    "padded-responses",
    Kind.SPEED,
    "verl.workers.utils.padding",
    {"response_to_nested": padded_at_once},
    {"response_to_nested": "a2272158cd69af64"},
    "the same for responses of a padded tensor",
    "nothing: the same values",
    "CPU 0 % (-1 to +3)",
    "verl reads the offsets once",
)

ONE_PARTITION = Patch(
    "one-partition",
    Kind.SPEED,
    "verl.utils.seqlen_balancing",
    {"get_seqlen_balanced_partitions": one_partition_is_all},
    {"get_seqlen_balanced_partitions": "5a3d752e6c5d5734"},
    "to balance rows over one worker verl compares all of them, and ends with all of them in order",
    "nothing: the same values",
    "CPU +14 % (+9 to +19)",
    "verl returns all rows where there is one partition",
)
