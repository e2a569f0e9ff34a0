"""A rollout engine for any decoder-only transformers model: continuous batching, exact log-probs, CPU and CUDA."""

from goldilocks.engine.engine import Engine
from goldilocks.engine.request import Generation, SamplingParams

__all__ = ["Engine", "Generation", "SamplingParams"]
