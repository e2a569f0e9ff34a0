"""Logits to tokens: random numbers, the cut (top-k, top-p), and the draw with its log-probs.

The random numbers are a function of seed and position alone. There is no generator state, so the draws of a request
depend neither on its batch nor on the device nor on the order of arrival. The draw inverts the cumulative distribution
in two stages, a block of the vocabulary and a token in it: two numbers a row, and no sum over 150,000 terms.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Numbers in [0, 1) of shape ``broadcast(seeds, positions) + (2,)``."""
    with np.errstate(over="ignore"):  # modulo 2**64
        bits = _mix(_mix(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)
    halves = np.stack([bits >> np.uint64(40), (bits >> np.uint64(8)) & np.uint64(0xFFFFFF)], axis=-1)
    return halves.astype(np.float32) * np.float32(2**-24)


BLOCK = 4096


class Drawn(NamedTuple):
    """For each row the token, its log-prob, and the largest log-prob of the row."""

    tokens: Tensor
    log_probs: Tensor
    top_log_probs: Tensor


def cut(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits with everything outside top-k, then top-p, at −inf. No top-k cut is ``top_k`` = the vocabulary size."""
    scaled = logits.float() / temperature[:, None]
    ranked = scaled.sort(dim=-1, descending=True).values
    kth = ranked.gather(1, top_k[:, None] - 1)
    probs = ranked.masked_fill(ranked < kth, -torch.inf).softmax(-1)
    # The last token needed to reach mass top_p is the one before which the mass is still below it.
    needed = ((probs.cumsum(-1) - probs) < top_p[:, None]).sum(-1, keepdim=True).clamp_min(1)
    pth = ranked.gather(1, needed - 1)
    return logits.float().masked_fill(scaled < torch.maximum(kth, pth), -torch.inf)


def _first_above(weights: Tensor, share: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds ``share`` of the total; never one of weight zero."""
    running = weights.cumsum(-1)
    reached = (running > share[:, None] * running[:, -1:]) & (weights > 0)
    # Rounding can leave nothing above the target: then the heaviest entry.
    return torch.where(reached.any(-1), reached.byte().argmax(-1), weights.argmax(-1))


def draw(logits: Tensor, temperature: Tensor, greedy: Tensor, uniforms: Tensor) -> Drawn:
    """Draw one token per row of ``logits`` [rows, vocabulary] with ``uniforms`` [rows, 2]."""
    scaled = logits.float() / temperature[:, None]
    top, best = scaled.max(-1)
    weights = (scaled - top[:, None]).exp_()
    size = min(BLOCK, weights.shape[1])
    blocks = F.pad(weights, (0, -weights.shape[1] % size)).view(len(weights), -1, size)
    mass = blocks.sum(-1)
    log_total = mass.sum(-1).log()
    if blocks.shape[1] == 1:
        sampled = _first_above(weights, uniforms[:, 1])
    else:
        block = _first_above(mass, uniforms[:, 0])
        inside = blocks.take_along_dim(block[:, None, None], 1).squeeze(1)
        sampled = block * size + _first_above(inside, uniforms[:, 1])
    tokens = torch.where(greedy > 0, best, sampled)
    chosen = scaled.gather(1, tokens[:, None]).squeeze(1)
    return Drawn(tokens, chosen - top - log_total, -log_total)
