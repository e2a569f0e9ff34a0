"""Continuous batching of requests over a fixed set of slots.

Every submitted request comes back from ``step`` exactly once: stopped, at its length limit, or aborted. A slot holds
one live request or none; a freed slot goes to the next waiting request at the next step. All bookkeeping is on the host
in arrays over slots; tokens reach it once per ``step``. New weights are copied in place: no tensor changes its address,
so captured graphs stay valid.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from goldilocks.engine.decoder import Decoder, uniforms
from goldilocks.engine.reach import check_length
from goldilocks.errors import refuse, require

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
        if not self.max_tokens >= 1:
            refuse("max_tokens", self.max_tokens, "1 or more")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            refuse("temperature", self.temperature, "a finite number, 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            refuse("top_p", self.top_p, "above 0 and at most 1 (1 = no cut)")

    @property
    def cuts(self) -> bool:
        """Whether top-k or top-p removes anything from the distribution."""
        return self.top_p < 1 or self.top_k > 0


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


def end_ids(tokenizer: Any, generation_config: Any) -> frozenset[int]:
    """Return the ids that end an answer: those of the tokenizer and of the generation config, if there is one."""
    named = getattr(generation_config, "eos_token_id", None)
    ids: Iterable[int | None] = named if isinstance(named, list) else [named]
    return frozenset(token for token in [tokenizer.eos_token_id, *ids] if token is not None)


def is_truncated(token_ids: Sequence[int], limit: float, ends: Collection[int]) -> bool:
    """Whether an answer ended because it was as long as allowed; it may have ended by itself at that very token."""
    return len(token_ids) >= limit and token_ids[-1] not in ends


@dataclass(frozen=True)
class _Request:
    """A request in the engine: what ends its answer, and its seed."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stops: frozenset[int]
    seed: int

    @property
    def last(self) -> int:
        """The position of the last token it may generate."""
        return len(self.prompt) + self.params.max_tokens - 1


class Engine:
    """Generates with a decoder-only transformers model. Synchronous: one thread calls it.

    The model becomes the engine's: it is moved to ``device`` and its attention is replaced. A model that then gives
    other log-probs than its own forward pass is refused. ``max_length`` bounds prompt and answer together and fixes,
    with ``slots``, the memory of the cache. ``eos_ids`` end every answer that does not ask to ignore them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_length: int,
        eos_ids: Iterable[int],
        pad_id: int,
        device: str | torch.device,
    ) -> None:
        require(slots >= 1, "slots", slots, "1 or more")
        check_length(model.config, max_length)
        self._model = model
        self._eos_ids = frozenset(eos_ids)
        self._max_length = max_length
        place = torch.device(device)
        if place.type == "cuda":
            from goldilocks.engine.graphs import GraphDecoder  # needs Triton, which CUDA builds of torch bring

            self._decoder: Decoder = GraphDecoder(model, slots, max_length, pad_id, place)
        else:
            self._decoder = Decoder(model, slots, max_length, pad_id, place)
        self._decoder.check_log_probs()
        self._waiting: deque[_Request] = deque()
        self._ended: list[Generation] = []  # since the last step
        self._ids: set[str] = set()
        self._arrived: set[int] = set()  # addresses of weights of which more are to come
        self._live: list[_Request | None] = [None] * slots
        self._resident: dict[tuple[int, ...], int] = {}  # prompt -> a slot whose cache still begins with it
        self._held: list[tuple[int, ...] | None] = [None] * slots  # slot -> the prompt that its cache begins with
        self._position = np.zeros(slots, dtype=np.int64)  # of the token fed next
        self._last = np.zeros(slots, dtype=np.int64)
        self._seed = np.zeros(slots, dtype=np.uint64)
        self._cuts = np.zeros(slots, dtype=bool)
        self._stops = np.full((slots, 1), -1, dtype=np.int64)
        columns = max_length + self._decoder.stride  # a row that has ended runs on to the end of the stride
        self._tokens = np.zeros((slots, columns), dtype=np.int64)
        self._log_probs = np.zeros((slots, columns), dtype=np.float32)
        self._top_log_probs = np.zeros((slots, columns), dtype=np.float32)

    @property
    def busy(self) -> bool:
        """Whether any request has not come back yet."""
        return bool(self._ids or self._ended)

    @property
    def free(self) -> int:
        """Slots that neither a live nor a waiting request has a claim on."""
        return max(0, self._live.count(None) - len(self._waiting))

    def submit(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request. Requests with the same prompt share its prefill."""
        prompt = tuple(map(int, prompt_ids))
        if request_id in self._ids:
            refuse("request_id", request_id, "an id that no request in flight has")
        if not prompt:
            refuse("prompt_ids", prompt, "one token or more")
        if (length := len(prompt) + params.max_tokens) > self._max_length:
            refuse("prompt tokens + max_tokens", length, f"max_length={self._max_length} or less")
        reach, known = (min(prompt), max(prompt)), self._decoder.vocab_size
        if reach[0] < 0 or reach[1] >= known:
            refuse("smallest and largest prompt_ids", reach, f"0 to {known - 1}")
        stops = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
        self._waiting.append(_Request(request_id, prompt, params, stops, seed))
        self._ids.add(request_id)

    def step(self) -> list[Generation]:
        """Admit what fits, decode, and return every request that ended."""
        running = bool(self._waiting) or any(self._live)
        if running and self._decoder.asleep:
            raise RuntimeError("the engine is asleep and has requests to run: call wake() first")
        ended, self._ended = self._ended, []
        self._ids.difference_update(generation.request_id for generation in ended)
        if running:
            self._admit()
            self._compact()
            ended += self._decode()
        return ended

    def abort(self, request_id: str) -> None:
        """End a request; it comes back from the next ``step`` with what it has.

        Unknown ids are ignored: an answer may end while the abort is on its way.
        """
        for slot, request in enumerate(self._live):
            if request is not None and request.request_id == request_id:
                self._ended.append(self._end(slot, int(self._position[slot]), "aborted"))
                return
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                self._ended.append(Generation.unstarted(request_id))
                return

    def abort_all(self) -> None:
        for request_id in list(self._ids):
            self.abort(request_id)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, last: bool = True) -> None:
        """Overwrite weights in place. Live requests continue with the new ones; cached prompts are forgotten.

        Weights may come in several calls, all but the ``last`` with False; after the last one, weights that did not
        come are an error.
        """
        self._forget()
        arrived, self._arrived = self._arrived, set()  # none, if this fails
        arrived |= overwrite(self._model, named_tensors)
        if last:
            check_all_arrived(self._model, arrived)
        else:
            self._arrived = arrived

    def sleep(self) -> None:
        """Give the cache's memory back. No request may be in a slot; those that wait go on after ``wake``."""
        if any(self._live):
            raise RuntimeError(f"sleep with {sum(r is not None for r in self._live)} live requests: abort_all() first")
        self._forget()
        self._decoder.release()

    def wake(self) -> None:
        """Take the cache's memory again."""
        if self._decoder.asleep:
            self._decoder.allocate()

    def _forget(self) -> None:
        self._resident.clear()
        self._held = [None] * len(self._held)

    def _hold(self, slot: int, prompt: tuple[int, ...] | None) -> None:
        """Note that the slot's cache now begins with ``prompt``; None: with one that older weights have read."""
        old = self._held[slot]
        if old is not None and self._resident.get(old) == slot:
            del self._resident[old]
        self._held[slot] = prompt
        if prompt is not None:
            self._resident.setdefault(prompt, slot)

    def _admit(self) -> None:
        """Give free slots to waiting requests.

        Prompts that a slot still holds are copied first, as a new one may take that slot. Then new ones are prefilled,
        and copied to the slots of further requests with the same prompt.
        """
        free = [slot for slot, request in enumerate(self._live) if request is None]
        count = min(len(free), len(self._waiting))
        if not count:
            return
        fresh: dict[int, tuple[int, ...]] = {}
        old: list[tuple[int, int]] = []
        new: list[tuple[int, int]] = []
        taken: dict[int, _Request] = {}
        for _ in range(count):
            request = self._waiting.popleft()
            source = self._resident.get(request.prompt)
            slot = free.pop(free.index(source) if source in free else 0)
            if source is None:
                fresh[slot] = request.prompt
            elif source != slot:
                (new if source in fresh else old).append((source, slot))
            self._hold(slot, request.prompt)
            self._occupy(slot, request)
            taken[slot] = request
        self._copy(old)
        prompts = {slot: prompt[:-1] for slot, prompt in fresh.items() if len(prompt) > 1}
        if prompts:
            self._decoder.prefill(list(prompts), list(prompts.values()))
        self._copy(new)
        params = [request.params for request in taken.values()]
        self._decoder.place(
            list(taken),
            [request.prompt[-1] for request in taken.values()],
            [len(request.prompt) - 1 for request in taken.values()],
            [one.temperature for one in params],
            [one.top_k for one in params],
            [one.top_p for one in params],
        )

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        length = max((len(self._held[target] or ()) - 1 for _, target in pairs), default=0)
        if length:
            self._decoder.copy([source for source, _ in pairs], [target for _, target in pairs], length)

    def _occupy(self, slot: int, request: _Request) -> None:
        self._live[slot] = request
        self._position[slot] = len(request.prompt) - 1
        self._last[slot] = request.last
        self._seed[slot] = request.seed
        self._cuts[slot] = request.params.cuts
        missing = len(request.stops) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[slot] = -1
        self._stops[slot, : len(request.stops)] = list(request.stops)

    def _compact(self) -> None:
        """Move the last live rows into holes where that makes the decoded batch smaller."""
        live = [slot for slot, request in enumerate(self._live) if request is not None]
        size = self._decoder.bucket(len(live))
        source = [slot for slot in live if slot >= size]
        if not source:
            return
        holes = (slot for slot in range(size) if self._live[slot] is None)
        target = [slot for _, slot in zip(source, holes, strict=False)]
        self._decoder.move(source, target, int(self._position[source].max()) + 1)
        requests = self._position, self._last, self._seed, self._cuts, self._stops
        for array in (*requests, self._tokens, self._log_probs, self._top_log_probs):
            array[target] = array[source]
        for old, slot in zip(source, target, strict=True):
            self._live[slot], self._live[old] = self._live[old], None
            self._hold(slot, self._held[old])

    def _decode(self) -> list[Generation]:
        """Decode a few steps, keep what they drew, and end the requests that they ended."""
        live = np.array([request is not None for request in self._live])
        rows = self._decoder.bucket(int(live.nonzero()[0].max()) + 1)
        live, begin, last = live[:rows], self._position[:rows], self._last[:rows]
        steps = int(min(self._decoder.stride, (last - begin)[live].max()))
        columns = begin[:, None] + np.arange(1, steps + 1)
        extent = int(min(columns[live].max(), self._max_length))
        noise = uniforms(self._seed[:rows, None], columns).swapaxes(0, 1)
        sampled = self._decoder.decode(rows, extent, noise, bool(self._cuts[:rows][live].any()))
        index = np.arange(rows)[:, None], np.minimum(columns, self._tokens.shape[1] - 1)
        self._tokens[index] = sampled.tokens.T
        self._log_probs[index] = sampled.log_probs.T
        self._top_log_probs[index] = sampled.top_log_probs.T
        self._position[:rows] += steps
        stopped = (sampled.tokens.T[:, :, None] == self._stops[:rows, None, :]).any(-1)
        over = stopped | (columns >= last[:, None])
        first = over.argmax(1)
        return [
            self._end(slot, int(columns[slot, first[slot]]), "stop" if stopped[slot, first[slot]] else "length")
            for slot in np.flatnonzero(over.any(1) & live).tolist()
        ]

    def _end(self, slot: int, last: int, reason: StopReason) -> Generation:
        """Free the slot; its answer reaches to position ``last``."""
        request = self._live[slot]
        assert request is not None
        self._live[slot] = None
        if reason != "aborted":
            self._ids.discard(request.request_id)
        answer = slice(len(request.prompt), last + 1)
        return Generation(
            request.request_id,
            self._tokens[slot, answer].tolist(),
            self._log_probs[slot, answer].tolist(),
            self._top_log_probs[slot, answer].tolist(),
            reason,
        )


@torch.inference_mode()
def overwrite(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> set[int]:
    """Copy each named tensor over the model's own. Unknown names, other shapes and values that are not finite raise.

    Tied tensors may come under one of their names or under all; then they must be equal. Returns the addresses that
    were written, for ``check_all_arrived``.
    """
    own = model.state_dict()
    written: dict[int, str] = {}
    finite: dict[str, Tensor] = {}
    for name, tensor in weights:
        target = own.get(name)
        if target is None:
            raise ValueError(f"weight {name!r} is not in {type(model).__name__}; it has e.g. {sorted(own)[:3]}")
        if target.shape != tensor.shape:
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}; the model's is {tuple(target.shape)}")
        tensor = tensor.to(target.device, target.dtype)
        if tensor.is_floating_point():
            finite[name] = tensor.isfinite().all()
        first = written.setdefault(target.data_ptr(), name)
        if first == name:
            target.copy_(tensor)
        elif not torch.equal(target, tensor) and finite.get(name, True):
            raise ValueError(
                f"weights {first!r} and {name!r} are tied in {type(model).__name__} but came with other values"
            )
    if finite and not torch.stack([*finite.values()]).all():  # one transfer from the device
        wrong = [name for name, is_finite in finite.items() if not is_finite]
        raise ValueError(f"weight {wrong[0]!r} and {len(wrong) - 1} more are not finite: the training has diverged")
    return {*written}


def check_all_arrived(model: nn.Module, written: Collection[int]) -> None:
    """Raise where a parameter is not among the addresses that ``overwrite`` has written."""
    missing = [name for name, one in model.named_parameters() if one.numel() and one.data_ptr() not in written]
    if missing:
        raise ValueError(f"weight {missing[0]!r} and {len(missing) - 1} more of {type(model).__name__} did not arrive")
