"""Steps captured as CUDA graphs, one per batch size; decode steps are replayed a few times between looks at the result.

A replay costs the host microseconds instead of the milliseconds of launching a model's kernels one by one. What a step
reads and writes lies at fixed addresses; weights are updated in place; so a graph is valid until the cache is released.

A third of the kernels of a decode step belong to norms. In a graph, RMS norms and rotary embeddings are one kernel
each, not seven and five, rounding where transformers rounds. A module or function is replaced only where it is seen to
compute the same: a norm on its instance, and ``apply_rotary_pos_emb`` of a model's module while a graph is captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from goldilocks.engine import kernels
from goldilocks.engine.cache import KernelWindow
from goldilocks.engine.decoder import Decoder, Sampled
from goldilocks.engine.sampling import cut

SMALLEST = 8  # rows of the smallest graph: with fewer, a step takes as long
PROMPTS = (8, 64)  # batch sizes of captured prefills
FEW_TOKENS = 8192  # a prefill of more tokens takes the GPU longer than the host takes to launch it: no need for a graph
ROTARY = "apply_rotary_pos_emb"
Rotary = Callable[..., tuple[Tensor, Tensor]]


class _Prefill(NamedTuple):
    """A captured prefill and the buffers it reads."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor
    tokens: Tensor


class GraphDecoder(Decoder):
    """Runs decode steps as CUDA graphs, in batch sizes that are powers of two, and small prefills likewise."""

    stride = 8
    spare = 1  # where the padding rows of a captured prefill go

    def __init__(self, model: PreTrainedModel, slots: int, max_length: int, pad_id: int, device: torch.device) -> None:
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._prefills: dict[tuple[int, int], _Prefill] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._tick = torch.zeros(1, dtype=torch.long, device=device)
        self._uniforms = torch.zeros(self.stride, slots, 2, device=device)
        # Log-prob, largest log-prob and token of each draw, which fp32 holds up to 16 million: one transfer for all.
        self._drawn = torch.zeros(self.stride, 3, slots, device=device)
        super().__init__(model, slots, max_length, pad_id, device)
        fuse_norms(model)
        settle_rotary(model)

    def release(self) -> None:
        """Give back the cache and the graphs, which hold its addresses."""
        self._graphs.clear()
        self._prefills.clear()
        self._pool = torch.cuda.graph_pool_handle()  # the old one died with the last graph that used it
        super().release()
        torch.cuda.empty_cache()

    def bucket(self, rows: int) -> int:
        """The next power of two."""
        return min(self.slots, max(SMALLEST, _power_of_two(rows)))

    def _prefill(self, rows: list[int], prompts: list[tuple[int, ...]]) -> None:
        height = next((size for size in PROMPTS if size >= len(rows)), len(rows))
        width = min(self.max_length, max(16, _power_of_two(max(map(len, prompts)))))
        if height > max(PROMPTS) or height * width > FEW_TOKENS:
            return super()._prefill(rows, prompts)
        prefill = self._prefills.get((height, width)) or self._capture_prefill(height, width)
        spare = [self.slots] * (height - len(rows))
        prefill.rows.copy_(self._device(np.array(rows + spare)))
        prefill.tokens.copy_(self._device(self._padded(prompts, height, width)))
        prefill.graph.replay()
        return None

    def _capture_prefill(self, height: int, width: int) -> _Prefill:
        rows = torch.full((height,), self.slots, device=self.device)
        tokens = torch.full((height, width), self.pad_id, device=self.device)
        graph = self._captured(lambda: self._fill(rows, tokens))
        self._prefills[height, width] = _Prefill(graph, rows, tokens)
        return self._prefills[height, width]

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
        """Capture a step. The run before capture is undone; what it wrote into the cache, the step writes again."""
        state = self._whole.clone()
        self._tick.zero_()
        self._graphs[rows, cuts] = self._captured(
            lambda: self._captured_step(rows, cuts), lambda: self._whole.copy_(state)
        )
        return self._graphs[rows, cuts]

    def _captured(self, step: Callable[[], None], undo: Callable[[], object] = lambda: None) -> torch.cuda.CUDAGraph:
        """A graph of ``step``, which runs once beforehand so that every kernel is compiled."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with fused_rotary(self.model, self.model.dtype, self.device):
            with torch.cuda.stream(side):
                step()
                undo()
            torch.cuda.current_stream(self.device).wait_stream(side)
            with torch.cuda.graph(graph, pool=self._pool):
                step()
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
        positions = self._positions[:rows, None]
        window = KernelWindow(self.store, self._positions[:rows])
        return self._forward(self._tokens[:rows, None], positions, self._last(positions), window)


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()


def fuse_norms(model: nn.Module) -> None:
    """Replace the forward of each RMS norm of ``model``, on that instance only."""
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = _only_weight(module)
        if isinstance(eps, float) and weight is not None and _is_rms_norm(module, weight, eps):
            module.forward = partial(_norm, module.forward, weight, eps)


def _norm(original: Callable[..., Any], weight: Tensor, eps: float, states: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not fits_norm(states, weight):
        return original(states, *args, **kwargs)
    from goldilocks.engine import kernels  # needs Triton, which only comes with a CUDA build of torch

    return kernels.rms_norm(states, weight, eps)


def fits_norm(states: Tensor, weight: Tensor) -> bool:
    """Whether the kernel may normalise these: rows as long as the weight, and of its type."""
    return states.shape[-1:] == weight.shape and states.dtype == weight.dtype


def _only_weight(module: nn.Module) -> Tensor | None:
    """The module's weight, if it has nothing else: a bias that is still zero would not show in the comparison."""
    held = dict([*module.named_parameters(), *module.named_buffers()])
    weight = held.get("weight")
    return weight if weight is not None and len(held) == weight.ndim == 1 and weight.is_contiguous() else None


@torch.inference_mode()
def _is_rms_norm(module: nn.Module, weight: Tensor, eps: float) -> bool:
    """Whether the module agrees with the kernel, up to rounding, for weights and inputs drawn at random.

    Half of the inputs are as small as ``eps`` is under the root, so that another place or value of it shows.
    """
    generator = torch.Generator(weight.device).manual_seed(0)
    drawn = torch.randn(9, len(weight), generator=generator, device=weight.device)
    drawn[5:] *= eps**0.5
    other, *states = drawn.to(weight.dtype)
    inputs = torch.stack(states)
    theirs = functional_call(module, {"weight": other}, (inputs,))
    ours = _norm(module.forward, other, eps, inputs)
    return theirs.dtype == ours.dtype and torch.allclose(ours, theirs, rtol=8 * torch.finfo(weight.dtype).eps, atol=0)


@contextmanager
def fused_rotary(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Within the block, the layers of ``model`` rotate with our kernel."""
    found = {name: getattr(sys.modules[name], ROTARY, None) for name in {type(m).__module__ for m in model.modules()}}
    originals = {
        name: rotary for name, rotary in found.items() if rotary is not None and _is_rotary(rotary, dtype, device)
    }
    try:
        for name, original in originals.items():
            setattr(sys.modules[name], ROTARY, partial(_rotate, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(sys.modules[name], ROTARY, original)


def settle_rotary(model: nn.Module) -> None:
    """Fix the frequencies of embeddings that choose them by the longest row of each call.

    The choice waits for the device, which the capture of a graph cannot. It is always the same below the length that
    the model was first trained for, and an engine goes no further.
    """
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = _settled(kind)  # type: ignore[assignment]
        elif isinstance(kind, dict):  # by the kind of layer
            module.rope_type = {layer: _settled(name) for layer, name in kind.items()}  # type: ignore[assignment]


def _settled(kind: str) -> str:
    return "default" if kind == "longrope" or "dynamic" in kind else kind


def fits_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel may rotate these: whole heads, of the types and strides that it was compared with.

    Models with partial rotary embeddings (GPT-NeoX, Phi-4-mini, GLM-4-MoE) have a ``cos`` narrower than a head, which
    the kernel would read past. A ``cos`` of another type (OLMo 2 keeps float32) rounds elsewhere.
    """
    if q.ndim != 4 or k.ndim != 4:
        return False
    rows, _, tokens, size = q.shape
    return (
        size % 2 == 0
        and k.shape[:1] + k.shape[2:] == q.shape[:1] + q.shape[2:]
        and cos.shape in ((rows, tokens, size), (1, tokens, size))
        and cos.shape == sin.shape
        and cos.stride() == sin.stride()
        and {q.dtype, k.dtype, cos.dtype, sin.dtype} == {q.dtype}
        and q.stride(-1) == k.stride(-1) == cos.stride(-1) == 1
    )


def _rotate(original: Rotary, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not fits_rotary(q, k, cos, sin):
        return original(q, k, cos, sin, *args, **kwargs)
    from goldilocks.engine import kernels  # needs Triton, which only comes with a CUDA build of torch

    return kernels.rotate(q, cos, sin), kernels.rotate(k, cos, sin)


@torch.inference_mode()
def _is_rotary(rotary: Rotary, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``rotary`` agrees with the kernel for inputs drawn at random."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, cos, sin = torch.randn(4, 2, 3, 5, 16, generator=generator, device=device).to(dtype)
    cos, sin = cos[:, 0], sin[:, 0]
    try:
        theirs = rotary(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):  # other arguments: another function by the same name
        return False
    rounding = 16 * torch.finfo(dtype).eps
    pairs = zip(_rotate(rotary, q, k, cos, sin), theirs, strict=True)
    return all(torch.allclose(ours, their, rtol=0, atol=rounding) for ours, their in pairs)
