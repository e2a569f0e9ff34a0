"""The model, its cache and the state of every slot on the device: prefill, copy, and decode the first rows.

All state lives in tensors made once. A decode step reads and advances it in place, so that the same step can be run
eagerly on a CPU and replayed as a CUDA graph. Nothing here knows about requests, stops or limits.

**The cache** has keys and values of every slot at fixed addresses. A slot is a row of every layer's tensors; column t
of the row belongs to the token at position t. Nothing is ever appended or reallocated while the store is held, so a
captured graph stays valid. A model sees the store through a window, which transformers takes for its cache.

**The attention** function is installed through transformers' own registry. Called by the engine, the 4-D
``attention_mask`` carries one of two things: integers, the last key position each query sees (prompts from position 0,
and single tokens on a GPU); or floats, an additive mask over the attended columns (single tokens on a CPU). Every other
call is plain scaled-dot-product attention: ``model.generate`` works unchanged.

**The random numbers** of a draw are a function of seed and position alone. There is no generator state, so the draws
of a request depend neither on its batch nor on the device nor on the order of arrival. The draw inverts the cumulative
distribution in two stages, a block of the vocabulary and a token in it: two numbers a row, and no sum over 150,000
terms.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from goldilocks.engine.reach import ANOTHER_ENGINE, attending, hides
from goldilocks.errors import require

SLOT_ATTENTION = "goldilocks_slots"  # of the attention function, in transformers' registry
CHECKED_TOKENS = 24  # of the text by which an engine is compared with its model; a third is read as a prompt
BLOCK = 4096  # tokens of the vocabulary
PREFILL_TOKENS = 16384  # prompt tokens in one forward pass, with padding: bounds the memory of activations
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


# -- the cache and the attention over it -------------------------------------------------------------------------------


class KVStore:
    """``keys`` and ``values`` hold one ``[slots, heads, length, head size]`` tensor per layer.

    Those of one shape are views of one tensor, so that rows of all layers are copied by one operation.
    """

    def __init__(
        self, shapes: list[tuple[int, int, int]], slots: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        wanted = [(heads, key) for heads, key, _ in shapes] + [(heads, value) for heads, _, value in shapes]
        self._stacks = {
            (heads, size): torch.zeros(count, slots, heads, length, size, dtype=dtype, device=device)
            for (heads, size), count in Counter(wanted).items()
        }
        views = {shape: iter(stack) for shape, stack in self._stacks.items()}
        tensors = [next(views[shape]) for shape in wanted]
        self.keys, self.values = tensors[: len(shapes)], tensors[len(shapes) :]

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` columns of the rows ``source`` into the rows ``target``; the two may overlap."""
        for stack in self._stacks.values():
            stack[:, target, :, :length] = stack[:, source, :, :length]


class _Window(Cache):
    """A cache as transformers sees it; subclasses decide where new keys go and which keys are attended."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        return 0


class ProbeWindow(_Window):
    """Stores nothing and records ``(heads, key size, value size)`` of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        known = len(self.shapes)
        require(layer_idx == known, "layer", layer_idx, f"{known}: layers that run in order, once each")
        self.shapes.append((key_states.shape[1], key_states.shape[3], value_states.shape[3]))
        return key_states, value_states


class PrefillWindow(_Window):
    """Prompts from position 0 on, written to the slots ``rows``; the prompt attends to itself."""

    def __init__(self, store: KVStore, rows: Tensor) -> None:
        super().__init__()
        self.store, self.rows = store, rows

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        length = key_states.shape[2]
        self.store.keys[layer_idx][self.rows, :, :length] = key_states
        self.store.values[layer_idx][self.rows, :, :length] = value_states
        return key_states, value_states


class DecodeWindow(_Window):
    """One token for each of the first slots, written at ``columns``; the first ``extent`` columns are attended."""

    def __init__(self, store: KVStore, rows: Tensor, columns: Tensor, extent: int) -> None:
        super().__init__()
        self.store, self.rows, self.columns, self.extent = store, rows, columns, extent

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        keys, values = self.store.keys[layer_idx], self.store.values[layer_idx]
        keys[self.rows, :, self.columns] = key_states[:, :, 0]
        values[self.rows, :, self.columns] = value_states[:, :, 0]
        count = len(self.rows)
        return keys[:count, :, : self.extent], values[:count, :, : self.extent]


class KernelWindow(_Window):
    """A ``DecodeWindow`` on a GPU: the attention kernel reads only the columns that a row has."""

    def __init__(self, store: KVStore, columns: Tensor) -> None:
        super().__init__()
        self.store, self.columns = store, columns

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        from goldilocks.engine import kernels  # needs Triton, which only comes with a CUDA build of torch

        keys, values = self.store.keys[layer_idx], self.store.values[layer_idx]
        kernels.write(key_states, value_states, keys, values, self.columns)
        return keys, values


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend ``query`` [rows, heads, tokens, size] over keys and values with as many or fewer heads."""
    for unsupported in ("softcap", "s_aux"):
        if kwargs.get(unsupported) is not None:
            raise ValueError(f"{unsupported}={kwargs[unsupported]!r} is not accepted: attention without it")
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        if query.shape[2] < key.shape[2]:
            from goldilocks.engine import kernels  # needs Triton, which only comes with a CUDA build of torch

            return kernels.attend(query, key, value, attention_mask, scaling or query.shape[3] ** -0.5), None
        attention_mask = None  # a prompt from position 0: plain causal attention
    elif attention_mask is not None and attention_mask.is_floating_point() and query.shape[2] == 1:
        return grouped_attention(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """One token per row: the heads that share a key head become the queries of that head, so no key is repeated."""
    rows, heads, _, size = query.shape
    folded = query.reshape(rows, key.shape[1], -1, size)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[3])


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
AttentionMaskInterface.register(SLOT_ATTENTION, sdpa_mask)


# -- draws -------------------------------------------------------------------------------------------------------------


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
    return Drawn(tokens, scaled.gather(1, tokens[:, None]).squeeze(1) - top - log_total, -log_total)


# -- the decoder -------------------------------------------------------------------------------------------------------


class Sampled(NamedTuple):
    """The draws of a few decode steps, on the host: ``[steps, rows]`` each."""

    tokens: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]
    top_log_probs: npt.NDArray[np.float32]


class Decoder:
    """Runs decode steps one operation at a time, as suits a CPU."""

    stride = 1  # steps between two looks at the results

    def __init__(self, model: PreTrainedModel, slots: int, max_length: int, pad_id: int, device: torch.device) -> None:
        nn.Module.to(model, device)
        self.model = model.train(False)
        self.device, self.slots, self.max_length, self.pad_id = device, slots, max_length, pad_id
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._refusal = f"model={type(model).__name__} is not accepted, use rollout.name=vllm for it:"
        self._shapes = self._probe()
        # Ids from the middle of the vocabulary, where tokens with a meaning of their own are rare.
        reach = self.vocab_size // 4, self.vocab_size // 2 + 1
        drawn = np.random.default_rng(0).integers(*reach, min(CHECKED_TOKENS, max_length))
        self._checked_text: tuple[int, ...] = tuple(drawn.tolist())
        ids = torch.tensor([self._checked_text], device=device)
        with torch.inference_mode():  # one pass without a cache: the log-probs of all tokens after each of the text
            logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
            self._own_log_probs: Tensor = logits.float().log_softmax(-1)
        self._store: KVStore | None = None
        self.allocate()
        self._rows = torch.arange(slots, device=device)
        # One matrix per type, so that placing and moving rows is one transfer and one operation each.
        self._int_state = torch.zeros(4, slots, dtype=torch.long, device=device)
        self._float_state = torch.ones(2, slots, device=device)
        self._tokens, self._positions, self._greedy, self._top_k = self._int_state
        self._temperature, self._top_p = self._float_state
        self._top_k.fill_(self.vocab_size)

    @torch.inference_mode()
    def _probe(self) -> list[tuple[int, int, int]]:
        """The shape of every layer's keys and values, from a forward pass over one token."""
        window, calls = ProbeWindow(), 0
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)

        def counting(*states: Any, **options: Any) -> tuple[Tensor, None]:
            nonlocal calls
            calls += 1
            return slot_attention(*states, **options)

        self.model.set_attn_implementation(SLOT_ATTENTION)
        with attending(self.model, f"{SLOT_ATTENTION}_counting", counting):
            try:
                self._forward(one, one, self._last(one), window)
            except Exception as error:
                raise ValueError(f"{self._refusal} {error}") from error
        if not window.shapes or calls != len(window.shapes):
            raise ValueError(
                f"{self._refusal} of {len(window.shapes)} layers that cache keys, {calls} attend through transformers' "
                "attention interface; all must"
            )
        reach = f"less, within the reach of every layer of {type(self.model).__name__}{ANOTHER_ENGINE}"
        require(not hides(self.model, self.max_length), "max_length", self.max_length, reach)
        return window.shapes

    def check_log_probs(self) -> None:
        """Refuse a model whose tokens have other log-probs here than in its own pass over the same text."""
        text, rows = self._checked_text, self.bucket(1)
        read = max(1, len(text) // 3)
        self.prefill([0], [text[:read]])
        drawn = []
        for place in range(read, len(text)):
            self.place([0], [text[place]], [place], [1.0], [-1], [1.0])
            drawn.append(self.decode(rows, place + 1, np.full((1, rows, 2), 0.5, dtype=np.float32), cuts=False))
        own, tokens = self._own_log_probs[read:].cpu(), torch.tensor([one.tokens[0, 0] for one in drawn])
        found = torch.tensor([one.log_probs[0, 0] for one in drawn])
        gap = float((found - own.gather(1, tokens[:, None])[:, 0]).abs().mean())
        # Rounding is relative: on an H200 bfloat16 makes 0.016 to 0.028 of the spread, positions that are wrong 0.6.
        limit = (1e-3 if self.model.dtype == torch.float32 else 0.05) * max(1.0, float(own.std(-1).mean()))
        if not gap <= limit:
            raise ValueError(
                f"{self._refusal} its tokens have other log-probs in Goldilocks' engine than in its own forward pass, "
                f"by {gap:.2g} in the mean; at most {limit:.2g} in {str(self.model.dtype).removeprefix('torch.')}"
            )
        del self._own_log_probs

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, window: Cache) -> Tensor:
        out = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=window,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    @staticmethod
    def _last(positions: Tensor) -> Tensor:
        """The last key each query sees, in the form the attention function takes it."""
        return positions.to(torch.int32)[:, None, :, None]

    @property
    def store(self) -> KVStore:
        """The cache; an engine that sleeps has none."""
        if self._store is None:
            raise RuntimeError("the engine is asleep: call wake() first")
        return self._store

    @property
    def asleep(self) -> bool:
        return self._store is None

    def allocate(self) -> None:
        dtype = self.model.dtype
        try:
            self._store = KVStore(self._shapes, self.slots, self.max_length, dtype, self.device)
        except RuntimeError as error:
            slot = self.max_length * dtype.itemsize * sum(heads * (key + value) for heads, key, value in self._shapes)
            raise ValueError(
                f"no memory for {self.slots * slot / 2**30:,.1f} GiB of cache: slots={self.slots} × "
                f"max_length={self.max_length} at {slot / 2**20:,.1f} MiB a slot; "
                "lower slots (rollout.max_num_seqs) or max_length"
            ) from error

    def release(self) -> None:
        self._store = None

    def bucket(self, rows: int) -> int:
        """The number of rows that is really computed when ``rows`` are asked for."""
        return rows

    def _device(self, values: npt.NDArray[np.generic]) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type == "cuda":  # from pinned memory the host need not wait for the copy
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

    @torch.inference_mode()
    def prefill(self, rows: list[int], prompts: list[tuple[int, ...]]) -> None:
        """Fill the cache rows with the keys and values of ``prompts``, like lengths together to keep padding low."""
        order = sorted(range(len(rows)), key=lambda i: len(prompts[i]))
        while order:
            width = len(prompts[order[-1]])
            count = max(1, PREFILL_TOKENS // width)
            chunk, order = order[-count:], order[:-count]
            # Padding stands to the right: causal attention keeps it out of the prompt, later tokens overwrite it.
            tokens = np.full((len(chunk), width), self.pad_id, dtype=np.int64)
            for row, place in zip(tokens, chunk, strict=True):
                row[: len(prompts[place])] = prompts[place]
            self._fill(self._device(np.array([rows[place] for place in chunk])), self._device(tokens))

    def _fill(self, rows: Tensor, tokens: Tensor) -> None:
        positions = torch.arange(tokens.shape[1], device=self.device).expand(len(rows), -1)
        self._forward(tokens, positions, self._last(positions), PrefillWindow(self.store, rows))

    @torch.inference_mode()
    def copy(self, source: list[int], target: list[int], length: int) -> None:
        """Copy the first ``length`` cached positions of some rows to others, all at once."""
        self.store.copy(self._device(np.array(source)), self._device(np.array(target)), length)

    @torch.inference_mode()
    def place(
        self,
        rows: list[int],
        tokens: list[int],
        positions: list[int],
        temperatures: list[float],
        top_k: list[int],
        top_p: list[float],
    ) -> None:
        """Set what the next step of each row starts from: the token to feed, its position, how to draw."""
        hot, limits = np.array(temperatures, dtype=np.float32), np.array(top_k)
        limits = np.where(limits > 0, np.minimum(limits, self.vocab_size), self.vocab_size)
        whole = self._device(np.array([rows, tokens, positions, hot == 0, limits], dtype=np.int64))
        real = self._device(np.array([np.where(hot > 0, hot, 1), top_p], dtype=np.float32))
        self._int_state.index_copy_(1, whole[0], whole[1:])
        self._float_state.index_copy_(1, whole[0], real)

    @torch.inference_mode()
    def move(self, source: list[int], target: list[int], length: int) -> None:
        """Move whole rows, cache and state."""
        self.copy(source, target, length)
        old, new = self._device(np.array(source)), self._device(np.array(target))
        for state in (self._int_state, self._float_state):
            state[:, new] = state[:, old]

    @torch.inference_mode()
    def decode(self, rows: int, extent: int, uniforms: npt.NDArray[np.float32], cuts: bool) -> Sampled:
        """Draw ``len(uniforms)`` tokens for each of the first ``rows`` rows, none past column ``extent``."""
        steps = []
        for numbers in self._device(uniforms):
            logits = self._logits(rows, extent)
            if cuts:
                logits = cut(logits, self._temperature[:rows], self._top_k[:rows], self._top_p[:rows])
            steps.append(draw(logits, self._temperature[:rows], self._greedy[:rows], numbers))
            self._advance(rows, steps[-1].tokens)
        return Sampled(*(torch.stack(part).cpu().numpy() for part in zip(*steps, strict=True)))

    def _advance(self, rows: int, tokens: Tensor) -> None:
        self._tokens[:rows] = tokens
        # A row that has ended runs on until it is looked at: it stays in its last column.
        self._positions[:rows].add_(1).clamp_(max=self.max_length - 1)

    def _logits(self, rows: int, extent: int) -> Tensor:
        positions = self._positions[:rows, None]
        columns = torch.arange(extent, device=self.device)
        mask = torch.zeros((), dtype=self.model.dtype, device=self.device).masked_fill(columns > positions, -torch.inf)
        window = DecodeWindow(self.store, self._rows[:rows], self._positions[:rows], extent)
        return self._forward(self._tokens[:rows, None], positions, mask[:, None, None, :], window)
