"""``goldilocks.guard``: how far the policy may be from the one that wrote a mini-batch. The maths needs tensors."""

from __future__ import annotations

from dataclasses import dataclass

from goldilocks.errors import require


@dataclass(frozen=True)
class Guard:
    """Both bounds are on a mean of (log π − log π of the policy that wrote the token)²."""

    enable: bool = False
    bound: float = 0.04  # M2PO's; tokens that an update would push further are masked until their mean is within it
    skip: float | None = 0.4  # over all tokens: beyond it the update is not made; None: it always is

    def __post_init__(self) -> None:
        require(self.bound > 0, "guard.bound", self.bound, "a number above 0")
        require(self.skip is None or self.skip > 0, "guard.skip", self.skip, "a number above 0, or null: never skip")
