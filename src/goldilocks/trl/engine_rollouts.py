"""Rollouts by Goldilocks' own engine in the place of ``model.generate``.

The engine has a copy of the model, in the precision of the training's forward pass, and takes the weights over before
the first round after they changed. A slot that is freed goes to the next request, prompts are prefilled once for all
their rollouts, and the log-probs of what was sampled come back with it.

Of a model that PEFT trains, the weights are base and adapter merged, under the names that the base model has. The
trained model stays as it is. Each adapted layer is copied, PEFT merges the copy in fp32, and the copy is let go: no
more memory is taken than that of one layer.

Of conversations with tools TRL asks for the first turn of all, then for the next turn of those that called a tool. It
keeps their order and does not say which they are, so each is found again by what it has written.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from goldilocks.engine import Engine, SamplingParams
from goldilocks.engine.engine import Generation
from goldilocks.engine.reach import bounds, check_length
from goldilocks.errors import require
from goldilocks.types import hashed

Version = tuple[Any, ...]
Ids = Sequence[int]
ROOM = 64  # the cache's length is a multiple of this, so that a prompt a little longer needs no new one


class EngineRollouts:
    """Generates for one process. ``slots`` is how many rollouts it decodes at a time."""

    def __init__(self, args: Any, *, slots: int, eos_ids: Sequence[int], pad_id: int, device: torch.device) -> None:
        require(slots >= 1, "engine_slots", slots, "1 or more rollouts at a time")
        usual = {"use_vllm": False, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None}
        for key, accepted in {**usual, "use_transformers_continuous_batching": False}.items():
            value = getattr(args, key, False)
            require(value in (accepted, {}), key, value, f"{accepted} with engine_slots")
        require(args.max_completion_length is not None, "max_completion_length", None, "a length, with engine_slots")
        self._args, self.slots, self._device = args, slots, device
        self._make = partial(Engine, slots=slots, eos_ids=eos_ids, pad_id=pad_id, device=device)
        self._dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        self._engine: Engine | None = None
        self._length = 0
        self._version: Version | None = None

    def generate(
        self, model: nn.Module, step: int, prompts: Sequence[Sequence[int]], seeds: Sequence[int], limits: Sequence[int]
    ) -> list[Generation]:
        """Return the generation of each prompt by ``model`` as it is now, after ``step`` updates.

        ``limits`` are the most tokens of each. An engine that is stopped on its way, as by Ctrl-C, is let go.
        """
        longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
        engine, args = self._ready(model, version(model, step), longest), self._args
        self._engine = None
        drawn = partial(SamplingParams, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k or -1)
        for number, (prompt, seed, limit) in enumerate(zip(prompts, seeds, limits, strict=True)):
            engine.submit(str(number), prompt, drawn(max_tokens=limit, seed=seed))
        found: dict[str, Generation] = {}
        while engine.busy:
            found |= {one.request_id: one for one in engine.step()}
        self._engine = engine
        return [found[str(number)] for number in range(len(prompts))]

    def _ready(self, model: nn.Module, version: Version, length: int) -> Engine:
        """Return an engine whose cache is long enough, with the weights of this version."""
        config: Any = model.config
        auto: Any = AutoModelForCausalLM
        if self._engine is None or length > self._length:
            check_length(config, length, "max_completion_length with the longest prompt")
            self._length = min([-(-length // ROOM) * ROOM, *bounds(config).values()])
            self._engine = self._version = None  # before another cache is allocated
            with torch.random.fork_rng(), self._device:  # weights that are overwritten at once cost the run no noise
                # A config of its own: the engine writes its attention's name there; the trained model must not read it.
                own = auto.from_config(copy.deepcopy(config), dtype=self._dtype)
            self._engine = self._make(own.eval(), max_length=self._length)
        if version != self._version:
            self._engine.load_weights(merged(model) if is_adapted(model) else model.state_dict().items())
            self._version = version
        return self._engine


def version(model: nn.Module, step: int) -> Version:
    """Return what changes whenever the weights do: by an update, or by loading others, at whatever step.

    torch counts the writes to a tensor, ``load_state_dict``'s among them. A parameter that was put in the place of
    another one lies elsewhere in memory.
    """
    return (step, *((one.data_ptr(), one._version) for one in model.parameters()))


class Turns:
    """The conversations of one round. ``longest`` bounds what the model and the tools write in all turns together."""

    def __init__(self, prompts: Sequence[Ids], seeds: Sequence[int], longest: int) -> None:
        self._texts = [list(ids) for ids in prompts]
        self._prompts = [len(ids) for ids in prompts]
        self._seeds, self._longest = seeds, longest
        self._turn = 0
        self._places: list[int] = []  # of the conversations that this turn is of

    def next(self, asked: Sequence[Ids]) -> tuple[list[int], list[int]]:
        """Begin a turn; return a seed and a limit in tokens for each conversation that goes on.

        A conversation's noise is a function of its seed and of the turn's number. Conversations with the same text are
        told apart by their order, which TRL keeps.
        """
        self._places, place = [], 0
        for ids in asked:
            while list(ids[: len(self._texts[place])]) != self._texts[place]:
                place += 1
            self._places.append(place)
            place += 1
        written = [len(ids) - self._prompts[place] for ids, place in zip(asked, self._places, strict=True)]
        seeds = [self._seeds[place] for place in self._places]
        later = [hashed(seed, self._turn) for seed in seeds] if self._turn else seeds
        self._turn += 1
        return later, [max(1, self._longest - length) for length in written]

    def wrote(self, asked: Sequence[Ids], answers: Sequence[Ids]) -> None:
        """Note what the model has answered in the turn that was begun last."""
        for place, ids, answer in zip(self._places, asked, answers, strict=True):
            self._texts[place] = [*ids, *answer]


# -- adapters ----------------------------------------------------------------------------------------------------------


def is_adapted(model: nn.Module) -> bool:
    """Whether PEFT trains an adapter of the model."""
    return hasattr(model, "peft_config")


def check_adapters(model: Any, key: str, value: object) -> None:
    """Refuse adapters that cannot be merged; ``key`` and ``value`` are what asks for merged weights."""
    for adapter in model.peft_config.values():
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        require(not adapter.is_prompt_learning, key, value, f"none with PEFT's {kind}, which has nothing to merge")
    packed = getattr(model.config, "quantization_config", None) is not None
    require(not packed, key, value, "none with an adapter of a quantized model: the engine has full weights")
    base = model.get_base_model()
    if getattr(base.config.get_text_config(), "tie_word_embeddings", False):
        # Both sides would be merged with different adapters, or with views that cannot be copied.
        sides = base.get_input_embeddings(), base.get_output_embeddings()
        first, last = ({id(one) for one in side.parameters() if one.requires_grad} for side in sides)
        accepted = (
            "none with an adapter of one side of tied embeddings (tie_word_embeddings): PEFT keeps both sides equal "
            "with modules_to_save=['embed_tokens'], ensure_weight_tying=True, and with trainable_token_indices"
        )
        require(first == last, key, value, accepted)


def merged(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of the base model by name, with the active adapters merged in."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = model.get_base_model()
    layers: dict[str, nn.Module] = {}  # what PEFT put in the place of a layer; of layers in one another, the outermost
    for name, module in base.named_modules():  # parents first
        adapted = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if adapted and not _is_inside(name, layers):
            layers[name] = module
    for name, tensor in base.state_dict().items():
        if not _is_inside(name, layers):
            yield name, tensor
    for name, layer in layers.items():
        for part, tensor in _merged_layer(layer).state_dict().items():
            yield f"{name}.{part}", tensor


def _is_inside(name: str, layers: Mapping[str, nn.Module]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:depth]) in layers for depth in range(1, len(parts)))


def _merged_layer(layer: nn.Module) -> nn.Module:
    own: Any = copy.deepcopy(layer).float()
    if hasattr(own, "unload_and_optionally_merge_module"):  # a layer that is trained whole, or by some of its rows
        module: nn.Module = own.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        return module
    for part in own.modules():
        if hasattr(part, "merge"):
            part.merge()
    base: nn.Module = own.get_base_layer()
    return base
