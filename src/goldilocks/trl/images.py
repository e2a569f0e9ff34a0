"""Images in TRL's batches: cut out for each row, and put together again.

TRL keeps the images of a batch in columns as long as all images, tiles or patches together, and counts how many of them
each row has. A row keeps its own part, so that rows of several rounds, and of earlier steps, make a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid

COUNTS = ("num_images", "num_tiles")  # lists with a number for each row
BY_TOKEN = ("token_type_ids", "mm_token_type_ids")  # over prompt and completion
FIELDS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "image_position_ids",
)
NAMES = frozenset({*COUNTS, *BY_TOKEN, *FIELDS})


def known_to_trl() -> bool:
    """Return whether this TRL gives every row its own images; older ones do so for some models only."""
    seen = split_pixel_values_by_grid({"pixel_values": torch.zeros(3, 1), "num_images": [1, 2]})
    return isinstance(seen["pixel_values"], list)


def split(output: Mapping[str, Any], prompts: Sequence[int], completions: Sequence[int]) -> list[dict[str, Tensor]]:
    """Return what each row has of the images' columns; ``prompts`` and ``completions`` are the lengths of the rows."""
    if "num_images" not in output:
        return [{} for _ in prompts]
    parts = split_pixel_values_by_grid(dict(output))
    begins = output["prompt_ids"].shape[1]
    rows = []
    for place, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = {name: torch.tensor(parts[name][place]) for name in COUNTS if name in parts}
        row |= {name: _own(parts[name], place) for name in FIELDS if name in parts}
        tokens = slice(begins - prompt, begins + completion)
        row |= {name: parts[name][place, tokens].cpu().clone() for name in BY_TOKEN if name in parts}
        rows.append(row)
    return rows


def _own(column: Sequence[Tensor] | Tensor, place: int) -> Tensor:
    """Return a row's part, with a dimension that parts are joined along."""
    part = column[place : place + 1] if isinstance(column, Tensor) else column[place]
    assert isinstance(part, Tensor)
    return part.cpu().clone()


def joined(rows: Sequence[Mapping[str, Tensor]], prompt: int, completion: int) -> dict[str, Any]:
    """Return the images' columns of a batch whose prompts and completions are padded to these widths."""
    there = {name for row in rows for name in row if name in NAMES}
    columns: dict[str, Any] = {
        name: [int(row[name]) if name in row else 0 for row in rows] for name in COUNTS if name in there
    }
    columns |= {name: _together([row[name] for row in rows if name in row]) for name in FIELDS if name in there}
    columns |= {name: _by_token(name, rows, prompt, completion) for name in BY_TOKEN if name in there}
    return columns


def _together(parts: Sequence[Tensor]) -> Tensor:
    """Join parts that are as many as they are; the other dimensions are padded to the largest."""
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat([_padded(part, shape) for part in parts])


def _padded(part: Tensor, shape: Sequence[int]) -> Tensor:
    missing = [size - own for size, own in zip(shape, part.shape[1:], strict=True)]
    return pad(part, [one for size in reversed(missing) for one in (0, size)]) if any(missing) else part


def _by_token(name: str, rows: Sequence[Mapping[str, Tensor]], prompt: int, completion: int) -> Tensor:
    out = torch.zeros(len(rows), prompt + completion, dtype=torch.long)
    for place, row in enumerate(rows):
        if name in row:
            start = prompt - len(row["prompt_ids"])
            out[place, start : start + len(row[name])] = row[name]
    return out


def texts_alone(messages: Any) -> Any:
    """Return a conversation that can be written down: of an image its place is left."""
    if isinstance(messages, str):
        return messages
    return [
        {**message, "content": _text(message["content"])} if isinstance(message.get("content"), list) else message
        for message in messages
    ]


def _text(content: list[dict[str, Any]]) -> str:
    return "".join(part["text"] if part.get("type") == "text" else f"<{part.get('type')}>" for part in content)
