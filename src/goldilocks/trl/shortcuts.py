"""Shortcuts of TRL's trainer: the same update for less work.

A row whose advantage is zero adds nothing to the gradient where the loss has no KL term: it is counted in the loss's
denominator and not computed. What is left is cut to its longest prompt and its longest completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from goldilocks.trl.rows import PROMPT

BY_ROW = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")  # each row's term is proportional to its advantage


def only_signal_allowed(args: Any) -> bool:
    """Whether a row without advantage has no part in the loss of this configuration, nor in its denominator."""
    off = {"beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "entropy_coef": 0.0}
    adaptive = getattr(args, "use_adaptive_entropy", False)
    return (
        args.loss_type in BY_ROW
        and not adaptive
        and all(getattr(args, key, value) == value for key, value in off.items())
    )


def with_signal(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the rows to compute and the share of all rows that they are; 0 where there is nothing to compute."""
    advantages: Tensor = inputs["advantages"]
    has = advantages != 0
    rows = len(advantages)
    if not has.any():
        return {}, 0.0
    kept = {name: value[has] if _per_row(value, rows) else value for name, value in inputs.items()}
    return _cut(kept), float(has.sum()) / rows


def signal_first(parts: Sequence[dict[str, Any]], together: int) -> list[dict[str, Any]]:
    """Return micro-batches of the same rows, ``together`` at a time for an update; rows with a signal come first.

    An update is a sum over its rows, so their order does not matter to it: where few have a signal, one micro-batch has
    them all and the others need not be computed.
    """
    windows = [parts[place : place + together] for place in range(0, len(parts), together)]
    return [part for window in windows for part in _sorted(window)]


def _sorted(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(parts) == 1:
        return list(parts)
    rows = len(parts[0]["advantages"])
    by_row = [name for name, value in parts[0].items() if _per_row(value, rows)]
    order = torch.cat([part["advantages"] for part in parts]).eq(0).to(torch.uint8).argsort(stable=True)
    columns = {name: torch.cat([part[name] for part in parts])[order].chunk(len(parts)) for name in by_row}
    return [{**part, **{name: columns[name][place] for name in by_row}} for place, part in enumerate(parts)]


def no_loss(model: nn.Module | None, device: torch.device) -> Tensor:
    """Return a loss of zero whose gradient is zero for every parameter, as that of rows without signal is.

    No gradient at all would be another thing: the optimizer would not move, where its momentum moves it on. Without a
    model nothing gets a gradient: an earlier micro-batch of the update has seen to it.
    """
    if model is None:
        return torch.zeros((), device=device, requires_grad=True)
    firsts = [one.view(-1)[:1] for one in model.parameters() if one.requires_grad and one.numel()]
    return 0.0 * torch.cat([one.float() for one in firsts]).sum()


def _per_row(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows


def _cut(inputs: dict[str, Any]) -> dict[str, Any]:
    """Prompts are padded on the left, completions on the right."""
    prompt, completion = (max(1, int(inputs[f"{part}_mask"].sum(1).max())) for part in ("prompt", "completion"))
    longest = inputs["completion_mask"].shape[1]

    def cut(name: str, value: Any) -> Any:
        if name in PROMPT:
            return value[:, -prompt:]
        by_token = isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == longest
        return value[:, :completion] if by_token else value

    return {name: cut(name, value) for name, value in inputs.items()}


@contextmanager
def having(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object of TRL's within the block."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
