"""A request to the engine and its generation: frozen, and checked where it is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from goldilocks.errors import require

StopReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn.

    ``temperature`` 0 is greedy, with the log-probs of temperature 1.
    ``top_k`` below 1 and ``top_p`` 1 mean no cut. Top-k cuts first, top-p cuts what is left; tokens tied with the last
    one kept are kept. ``stop_ids`` end the answer in addition to the engine's end-of-sequence ids; ``ignore_eos``
    leaves only ``stop_ids``. The same ``seed`` gives the same tokens whatever else is being generated; None draws one.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        require(finite, "temperature", self.temperature, "a finite number, 0 (greedy) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (1 = no cut)")

    @property
    def cuts(self) -> bool:
        """Whether top-k or top-p removes anything from the distribution."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True)
class Ask:
    """One request for an answer."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True)
class Generation:
    """One finished request. The token that stopped it is part of it.

    ``log_probs`` are of the distribution the token was drawn from; ``top_log_probs`` are that distribution's maximum.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    top_log_probs: list[float]
    stop_reason: StopReason

    @classmethod
    def unstarted(cls, request_id: str) -> Generation:
        """Return the generation of a request that was aborted before its first token."""
        return cls(request_id, [], [], [], "aborted")
