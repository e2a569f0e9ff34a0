"""Decode steps, and the reading of a few prompts, captured as CUDA graphs: one for each size.

Decode steps are replayed a few times between looks at the result. Where requests wait, prompts are read between most
looks, and the GPU would wait for the host to launch every kernel of that: with a 1.5B model, a third of all time.

A replay costs the host microseconds instead of the milliseconds of launching a model's kernels one by one. What a step
reads and writes lies at fixed addresses; weights are updated in place; so a graph is valid until the cache is released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from goldilocks.engine import kernels
from goldilocks.engine.decoder import Decoder, KernelWindow, Sampled, cut
from goldilocks.engine.layers import Fused, fits, settle_rotary

SMALLEST = 8  # rows of the smallest graph: with fewer, a step takes as long
FEW_TOKENS = 1024  # to read more takes the GPU longer than the host takes to launch it, of a 1.5B model on an H200
SIGHTS = 3  # of a size before it is captured: after each sleep everything is captured anew
FUSED_LAYERS = True  # of a model that allows it; a benchmark compares with its own modules


class GraphDecoder(Decoder):
    """Runs decode steps as CUDA graphs, in batch sizes that are powers of two, and reads few prompts likewise."""

    stride = 8

    def __init__(self, model: PreTrainedModel, slots: int, max_length: int, pad_id: int, device: torch.device) -> None:
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._readings: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._sights: Counter[tuple[int, int]] = Counter()
        self._pool = torch.cuda.graph_pool_handle()
        self._tick = torch.zeros(1, dtype=torch.long, device=device)
        self._uniforms = torch.zeros(self.stride, slots, 2, device=device)
        # Log-prob, largest log-prob and token of each draw, which fp32 holds up to 16 million: one transfer for all.
        self._drawn = torch.zeros(self.stride, 3, slots, device=device)
        super().__init__(model, slots, max_length, pad_id, device)
        settle_rotary(model)
        self._fused = Fused(model, max_length) if FUSED_LAYERS and fits(model) else None
        torch.cuda.empty_cache()  # weights that were laid side by side left their old places

    def release(self) -> None:
        self._graphs.clear()
        self._readings.clear()
        self._sights.clear()
        self._pool = torch.cuda.graph_pool_handle()  # the old one died with the last graph that used it
        super().release()
        torch.cuda.empty_cache()

    def bucket(self, rows: int) -> int:
        """The next power of two."""
        return min(self.slots, max(SMALLEST, 1 << (rows - 1).bit_length()))

    def _fill(self, rows: Tensor, tokens: Tensor) -> None:
        """Read prompts into these rows of the cache: few by a graph, whose spare rows are the first prompt again."""
        if self._fused is None:
            return super()._fill(rows, tokens)
        count, length = tokens.shape
        height, width = min(self.slots, 1 << (count - 1).bit_length()), max(SMALLEST, 1 << (length - 1).bit_length())
        self._sights[height, width] += 1
        if height * width > FEW_TOKENS or width > self.max_length or self._sights[height, width] < SIGHTS:
            return self._fused.fill(tokens, rows, self.store)
        places = torch.cat([rows, rows[:1].expand(height - count)])
        texts = torch.nn.functional.pad(tokens, (0, width - length), value=self.pad_id)
        texts = torch.cat([texts, texts[:1].expand(height - count, -1)])
        if texts.shape not in self._readings:  # the run before the capture reads these prompts
            read = partial(self._fused.fill, texts, places, self.store)
            self._readings[texts.shape] = self._captured(read), places, texts
            return None
        graph, its_places, its_texts = self._readings[texts.shape]
        its_places.copy_(places)
        its_texts.copy_(texts)
        return graph.replay()

    @torch.inference_mode()
    def decode(self, rows: int, extent: int, uniforms: npt.NDArray[np.float32], cuts: bool) -> Sampled:
        """Replay the graph of this batch size once per step; the host waits once, at the end."""
        graph = self._graphs.get((rows, cuts)) or self._capture(rows, cuts)
        steps = len(uniforms)
        self._uniforms[:steps, :rows] = self._device(uniforms)
        self._tick.zero_()
        for _ in range(steps):
            graph.replay()
        drawn = self._drawn[:steps, :, :rows].cpu().numpy()
        return Sampled(drawn[:, 2].astype(np.int64), drawn[:, 0], drawn[:, 1])

    def _capture(self, rows: int, cuts: bool) -> torch.cuda.CUDAGraph:
        """Capture a step. The run before the capture is undone; what it wrote into the cache, the step writes again."""
        state = self._int_state.clone()
        self._tick.zero_()
        step = partial(self._captured_step, rows, cuts)
        self._graphs[rows, cuts] = self._captured(step, lambda: self._int_state.copy_(state))
        return self._graphs[rows, cuts]

    def _captured(self, run: Callable[[], object], undo: Callable[[], object] = lambda: None) -> torch.cuda.CUDAGraph:
        """Return a graph of ``run``, which runs once beforehand so that every kernel is compiled."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            run()
            undo()
        torch.cuda.current_stream(self.device).wait_stream(side)
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph

    def _captured_step(self, rows: int, cuts: bool) -> None:
        logits = self._logits(rows, self.max_length)
        temperature = self._temperature[:rows]
        if cuts:
            logits = cut(logits, temperature, self._top_k[:rows], self._top_p[:rows])
        numbers = self._uniforms[:, :rows].index_select(0, self._tick)[0]
        drawn = kernels.draw(logits, temperature, self._greedy[:rows], numbers)
        self._advance(rows, drawn.tokens)
        found = torch.stack([drawn.log_probs, drawn.top_log_probs, drawn.tokens.float()])
        self._drawn[:, :, :rows].index_copy_(0, self._tick, found[None])
        self._tick.add_(1)

    def _logits(self, rows: int, extent: int) -> Tensor:
        if self._fused is not None:
            return self._fused.step(self._tokens[:rows], self._positions[:rows], self.store)
        positions = self._positions[:rows, None]
        window = KernelWindow(self.store, self._positions[:rows])
        return self._forward(self._tokens[:rows, None], positions, self._last(positions), window)
