"""verl's operations on rows of different lengths, without a step of Python, or a wait for the GPU, for every row."""

from __future__ import annotations

import functools
from typing import Any

from goldilocks.verl.patches.patch import Function


def select_rows_at_once(original: Function) -> Function:
    """Rows of tokens are picked from the values they lie in; whatever has another shape is verl's."""

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
    # torch does not look the lengths up again: a tensor that is not told its longest row is padded to all of them
    return torch.nested.nested_tensor_from_jagged(
        rows.values()[places], torch.cat([offsets[:1], ends]), min_seqlen=shortest, max_seqlen=longest
    )


def responses_at_once(original: Function) -> Function:
    """The offsets are read once, where verl asks a tensor for a number, and a GPU for an answer, for every row."""

    @functools.wraps(original)
    def response_from_nested(tensor: Any, response_mask: Any) -> Any:
        import torch

        values, ends = tensor.values(), tensor.offsets()[1:].tolist()
        lengths = response_mask.offsets().diff().tolist()
        # what the model says of a token it says at the token before
        rows = [values[end - length - 1 : end - 1] for end, length in zip(ends, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return response_from_nested


def padded_at_once(original: Function) -> Function:
    """As for responses that lie in one nested tensor, for those of a padded one."""

    @functools.wraps(original)
    def response_to_nested(tensor: Any, response_mask: Any) -> Any:
        import torch

        lengths = response_mask.offsets().diff().tolist()
        rows = [row[:length] for row, length in zip(tensor.unbind(), lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return response_to_nested


def one_partition_is_all(original: Function) -> Function:
    """To balance rows over one worker or into one micro-batch verl compares them all, and ends with all of them."""

    @functools.wraps(original)
    def get_seqlen_balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
        if k_partitions == 1 and len(seqlen_list):
            return [list(range(len(seqlen_list)))]
        return original(seqlen_list, k_partitions, equal_size)

    return get_seqlen_balanced_partitions
