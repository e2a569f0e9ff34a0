"""A decode step captured once per batch size as a CUDA graph, replayed a few times between two looks at the results.

A replay costs the host microseconds instead of the milliseconds of launching a model's kernels one by one. What a step
reads and writes lies at fixed addresses; weights are updated in place; so a graph is valid until the cache is released.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from goldilocks.rollout import kernels
from goldilocks.rollout.cache import KernelWindow
from goldilocks.rollout.decoder import Decoder, Sampled
from goldilocks.rollout.sampling import cut

SMALLEST = 8
"""Fewer rows than this cost as much as this many: the step then only reads the weights."""


class GraphDecoder(Decoder):
    """Runs decode steps as CUDA graphs, in batch sizes that are powers of two."""

    stride = 8

    def __init__(self, model: PreTrainedModel, slots: int, max_length: int, pad_id: int, device: torch.device) -> None:
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._tick = torch.zeros(1, dtype=torch.long, device=device)
        self._uniforms = torch.zeros(self.stride, slots, 2, device=device)
        self._drawn = torch.zeros(self.stride, slots, dtype=torch.long, device=device)
        self._scores = torch.zeros(self.stride, 2, slots, device=device)
        super().__init__(model, slots, max_length, pad_id, device)

    def release(self) -> None:
        """Give back the cache and the graphs, which hold its addresses."""
        self._graphs.clear()
        super().release()
        torch.cuda.empty_cache()

    def bucket(self, rows: int) -> int:
        """The next power of two."""
        return min(self.slots, max(SMALLEST, 1 << (rows - 1).bit_length()))

    @torch.inference_mode()
    def decode(self, rows: int, extent: int, uniforms: npt.NDArray[np.float32], cuts: bool) -> Sampled:
        """Replay the graph of this batch size once per step; one transfer each way."""
        graph = self._graphs.get((rows, cuts)) or self._capture(rows, cuts)
        steps = len(uniforms)
        self._uniforms[:steps, :rows] = self._device(uniforms)
        self._tick.zero_()
        for _ in range(steps):
            graph.replay()
        scores = self._scores[:steps, :, :rows].cpu().numpy()
        return Sampled(self._drawn[:steps, :rows].cpu().numpy(), scores[:, 0], scores[:, 1])

    def _capture(self, rows: int, cuts: bool) -> torch.cuda.CUDAGraph:
        """Capture a step. It runs once beforehand, so that every kernel is compiled, and its effects are undone; what
        it wrote into the cache, the step itself writes again."""
        state = (self._tokens, self._positions, self._tick)
        before = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._tick.zero_()
            self._captured_step(rows, cuts)
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._captured_step(rows, cuts)
        self._graphs[rows, cuts] = graph
        return graph

    def _captured_step(self, rows: int, cuts: bool) -> None:
        logits = self._logits(rows, self.max_length)
        temperature = self._temperature[:rows]
        if cuts:
            logits = cut(logits, temperature, self._top_k[:rows], self._top_p[:rows])
        numbers = self._uniforms[:, :rows].index_select(0, self._tick)[0]
        drawn = kernels.draw(logits, temperature, self._greedy[:rows], numbers)
        self._advance(rows, drawn.tokens)
        self._drawn[:, :rows].index_copy_(0, self._tick, drawn.tokens[None])
        scores = torch.stack([drawn.log_probs, drawn.top_log_probs])
        self._scores[:, :, :rows].index_copy_(0, self._tick, scores[None])
        self._tick.add_(1)

    def _logits(self, rows: int, extent: int) -> Tensor:
        positions = self._positions[:rows, None]
        window = KernelWindow(self.store, self._positions[:rows])
        return self._forward(self._tokens[:rows, None], positions, self._last(positions), window)
