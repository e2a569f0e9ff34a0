"""Uniform random numbers that are a function of (seed, position) and of nothing else.

No generator state exists, so what a request draws cannot depend on its batch mates, on the device or on the order of
arrival. Two numbers per position: the sampler picks a block of the vocabulary with one, a token in it with the other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Numbers in [0, 1) of shape ``broadcast(seeds, positions) + (2,)``."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        bits = _mix(_mix(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)
    halves = np.stack([bits >> np.uint64(40), (bits >> np.uint64(8)) & np.uint64(0xFFFFFF)], axis=-1)
    return halves.astype(np.float32) * np.float32(2**-24)
