"""The same values in less time: log-probs, rows of different lengths, messages of the TransferQueue.

**Log-probs** of padded rows are taken of many tokens at a time, from the logits of the responses alone. The logits of a
prompt are 49 to 152 thousand numbers per token that no loss reads. Rows are padded on the right, so the responses of a
micro-batch lie in one window of columns, from the end of the shortest prompt to the last column but one. transformers
computes logits of a window (``logits_to_keep``), and the log-probs outside of it are zeros that are cut off with the
prompt. Where the trainer says so (``goldilocks.verl.update.log_probs``), the update's own forward pass also gives
``old_log_probs``. The trainer then sends how many rows and response tokens the batch has: they normalise the loss.

**Rows by length.** verl fills micro-batches with long rows beside short ones. Without flash-attn a micro-batch is
computed as wide as its longest row. The gradient is the sum over micro-batches either way.

**Messages.** The TransferQueue sends every row of every field as a message part of its own: 512 rows of 8 fields are
4,096 parts, which take longer than their tokens. Here the short rows of a field are one buffer and their lengths. The
message itself says how it is unpickled, so a process without the plug-in understands it too, and packs its own answers
from then on: the storage units, which import nothing of verl, need no setting.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from goldilocks.verl.patch import (
    DISTANCE,
    GAP_SUM,
    GAP_TOKENS,
    MOVED_SUM,
    MOVED_TOKENS,
    WHOLE_ROWS,
    WHOLE_TOKENS,
    Function,
    Kind,
    Patch,
    around,
)

if TYPE_CHECKING:
    import torch

LOGITS_PER_BLOCK = 1 << 26  # 256 MiB in fp32, so that peak memory stays low
WINDOW = "goldilocks_window"  # the first column whose logits are computed
EVEN = 0.75  # a share of tokens that are no padding: below it padding is left out, above it a copy of logits is saved
KERNELS = ("FLAH_ATTN", "NPU")  # by which verl takes log-probs of many tokens itself, as it spells them
# What starting a micro-batch costs, in tokens: one with fewer is not worth its kernels' launches.
START_TOKENS = 4096

LONGEST = 16_384  # bytes of a row: copying a longer one costs more than a message part of its own
FEWEST = 8  # rows of a field: fewer stay as they are
PUT = "PUT"  # the request that gives rows to a storage unit


# -- log-probs ---------------------------------------------------------------------------------------------------------


def log_probs_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Take log-probs by blocks of tokens. verl's loop without flash-attn goes token by token."""
    import torch

    vocabulary, exact = logits.shape[-1], logits.dtype in (torch.float32, torch.float64)
    rows, picks = logits.reshape(-1, vocabulary), labels.reshape(-1, 1)
    size = max(1, LOGITS_PER_BLOCK // vocabulary)
    found = []
    for block, pick in zip(rows.split(size), picks.split(size), strict=True):
        # verl's two formulas: in half precision logsumexp is not accurate enough
        scores = (block if exact else block.log_softmax(-1)).gather(-1, pick).squeeze(-1)
        found.append(scores - block.logsumexp(-1) if exact else scores)
    return torch.cat(found).view(labels.shape)


@around
def ask_for_a_window(original: Function, self: Any, micro_batch: Any) -> Any:
    """The model's inputs, with the columns whose logits are wanted: all, where verl does not say where prompts end."""
    inputs, output_args = original(self, micro_batch)
    if _only_log_probs_count(self, micro_batch):
        import torch

        lengths, responses = micro_batch["input_ids"].offsets().diff(), micro_batch.get("responses", None)
        nested = responses is not None and responses.is_nested  # verl's V0 trainer sends them padded
        first = int((lengths - responses.offsets().diff()).min()) - 1 if nested else 0
        width = inputs["input_ids"].shape[1]
        if "logits_to_keep" in inspect.signature(self.module.forward).parameters:
            inputs["logits_to_keep"] = torch.arange(first, width - 1, device=inputs["input_ids"].device)
        output_args[WINDOW] = first
        output_args["labels"] = inputs["input_ids"][:, first + 1 :]
    return inputs, output_args


def read_a_window(original: Function) -> Function:
    """Log-probs, and entropies where they are asked for, from the logits of a window."""

    @functools.wraps(original)
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        if WINDOW not in output_args:
            return original(self, output, output_args, micro_batch, logits_processor_func)
        import torch
        from torch.utils.checkpoint import checkpoint
        from verl.utils import tensordict_utils as tu
        from verl.utils import torch_functional

        first, labels, logits = output_args[WINDOW], output_args["labels"], output.logits
        if hasattr(logits, "full_tensor"):  # of a model whose words are divided among devices
            logits = logits.full_tensor()
        if logits.shape[1] > labels.shape[1]:  # of a model that computes them all
            logits = logits[:, first:-1]
        offsets = micro_batch["input_ids"].offsets()
        columns = torch.arange(first, first + labels.shape[1], device=labels.device)
        kept = columns < (offsets.diff() - 1).unsqueeze(1)  # the others are padding
        temperature = output_args["temperature"].clamp(min=1e-8).unsqueeze(1).expand(kept.shape)
        uneven = int(kept.sum()) < EVEN * kept.numel()
        if uneven:
            logits, labels, temperature = logits[kept], labels[kept], temperature[kept]
        if not output_args.get("temperature_is_one", False):  # not every verl looks
            logits = logits / temperature.unsqueeze(-1).to(logits.dtype)
        quick = any(getattr(torch_functional, f"{kind}_CROSS_ENTROPY_LOSS_AVAILABLE", False) for kind in KERNELS)
        found = {"log_probs": (torch_functional.logprobs_from_logits if quick else log_probs_of)(logits, labels)}
        if tu.get_non_tensor_data(micro_batch, "calculate_entropy", False):
            entropy = torch_functional.entropy_from_logits
            again = self.engine_config.entropy_checkpointing
            found["entropy"] = checkpoint(entropy, logits, use_reentrant=False) if again else entropy(logits)
        places, total = (offsets[:-1].unsqueeze(1) + columns)[kept], micro_batch["input_ids"].values().shape[0]
        nested = {}  # as the inputs are; zeros elsewhere
        for name, values in found.items():
            whole = values.new_zeros(total).index_put((places,), values if uneven else values[kept])
            nested[name] = torch.nested.nested_tensor_from_jagged(whole, offsets)
        return nested

    prepare_model_outputs.reads_a_window = True  # type: ignore[attr-defined]
    return prepare_model_outputs


def _only_log_probs_count(engine: Any, micro_batch: Any) -> bool:
    """Whether rows are padded, and nothing but log-probs and entropies of their tokens is read."""
    from verl.utils import tensordict_utils as tu

    wanted_whole = ("use_fused_kernels", "calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")
    reads = getattr(type(engine).prepare_model_outputs, "reads_a_window", False)  # a critic's outputs are values
    padded = not tu.get_non_tensor_data(micro_batch, "use_remove_padding", True)
    return reads and padded and not any(tu.get_non_tensor_data(micro_batch, key, False) for key in wanted_whole)


LOG_PROBS = Patch(
    name="log-probs",
    kind=Kind.SPEED,
    module="verl.workers.engine.fsdp.transformer_impl",
    replaced={
        "FSDPEngineWithLMHead.prepare_model_inputs": ask_for_a_window,
        "FSDPEngineWithLMHead.prepare_model_outputs": read_a_window,
    },
    written_for={
        "FSDPEngineWithLMHead.prepare_model_inputs": ("e7a30a3b61b58c8b", "72c8a6bf3ebdbc09"),
        "FSDPEngineWithLMHead.prepare_model_outputs": ("5239f536e8f617e3", "70fabcba8ab36ac6"),
    },
    reason="without flash-attn verl takes log-probs of one token at a time, and logits of prompts, which no loss reads",
    changes="log-probs of prompts are 0; on a GPU a block may be summed in another order than a token",
    without="a step takes 3.86 times as long; with the prompts' logits alone +4 %, and 12 % more memory",
    needless_when="verl takes log-probs of many tokens at once, and of responses alone (logits_to_keep)",
)


@around
def own_log_probs(original: Function, config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """``old_log_probs`` that are absent, or NaN for a token, are the log-probs of this pass, without their gradient."""
    import torch
    from verl.utils import tensordict_utils as tu

    rows = tu.get_non_tensor_data(data, WHOLE_ROWS, None)
    if rows is None:
        return original(config, model_output, data, dp_group)
    data = data.copy().clear_device_()
    # verl cuts one answer after the other out of the log-probs; with lengths on the GPU it waits for it at each.
    data["prompts"], data["responses"] = data["prompts"].cpu(), data["responses"].cpu()
    given, mask = data.get("old_log_probs", None), data["response_mask"]
    own = _of_answers(model_output["log_probs"].detach(), mask)
    old = own if given is None else torch.where(given.values().isnan(), own.to(given.dtype), given.values())
    lengths = data["responses"].offsets().diff()
    # Give torch the longest row: without it, a tensor is padded to the sum of all lengths.
    data["old_log_probs"] = torch.nested.nested_tensor_from_jagged(
        old, mask.offsets(), min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
    )
    tokens = tu.get_non_tensor_data(data, WHOLE_TOKENS, None)
    tu.assign_non_tensor(data, global_batch_size=rows, batch_num_tokens=tokens)
    loss, metrics = original(config, model_output, data, dp_group)
    return loss, {**metrics, **_distance_to_rollouts(own, data, given)}


def _distance_to_rollouts(own: Any, data: Any, given: Any) -> dict[str, float]:
    """How far the trainer's probabilities are from the rollout engine's; verl takes this from the pass left out here.

    ``own`` are the log-probs of all response tokens. Also sums of how far these are from the engine's: over tokens that
    this policy wrote, and over those that an older one wrote, whose log-probs are ``given``.
    """
    import torch

    from goldilocks.losses.log_probs import gap_sums

    mask = data["response_mask"].values().bool()
    if "rollout_log_probs" not in data or not mask.any():
        return {}
    sampled = data["rollout_log_probs"].values()
    apart = (own[mask].exp() - sampled[mask].exp()).abs()
    fresh = mask if given is None else mask & given.values().isnan()
    sums = [*gap_sums(own, sampled, fresh), *gap_sums(own, sampled, mask & ~fresh)]
    found = torch.stack([apart.mean(), apart.max(), *sums]).tolist()
    names = (f"{DISTANCE}_mean", f"{DISTANCE}_max", GAP_SUM, GAP_TOKENS, MOVED_SUM, MOVED_TOKENS)
    return {f"{DISTANCE}_valid": 1, **dict(zip(names, found, strict=True))}


def _of_answers(log_probs: Any, mask: Any) -> Any:
    """The values of verl's ``response_from_nested``, of all rows at once: those of a token stand at the one before."""
    import torch

    offsets, total = mask.offsets(), mask.values().shape[0]
    shifts = (log_probs.offsets()[1:] - 1 - offsets[1:]).repeat_interleave(offsets.diff(), output_size=total)
    return log_probs.values()[torch.arange(total, device=offsets.device) + shifts]


ONE_PASS = Patch(
    name="one-pass",
    kind=Kind.SPEED,
    module="verl.workers.engine_workers",
    replaced={"ppo_loss": own_log_probs},
    written_for={"ppo_loss": "d7c0f8772b444f55"},
    reason="with one optimizer step per batch its own pass gives old_log_probs, and rows without signal need no pass",
    changes="loss and gradients are verl's; metrics of the pass left out are absent or of the rows computed: see below",
    without="a pass of 1.7 s more a step, and of 3.1 to 3.8 s in verl's trainer (lab/trainer.md)",
    needless_when="verl's loss takes old_log_probs that are absent for those of its own pass",
)


# -- rows of different lengths -----------------------------------------------------------------------------------------


@around
def rows_by_length(original: Function, batch: Any, max_token_len: int, dp_group: Any = None, **options: Any) -> Any:
    """Cut the rows, sorted by length, where computing them together costs more than one more micro-batch."""
    if not _is_padded(batch, dp_group, options):
        return original(batch, max_token_len, dp_group=dp_group, **options)
    lengths = batch["input_ids"].offsets().diff().tolist()
    if max(lengths) > max_token_len:
        return original(batch, max_token_len, dp_group=dp_group, **options)  # which says so
    parts = cut_by_length(lengths, max_token_len)
    return _divided(batch, parts), parts


def _divided(batch: Any, parts: Sequence[Sequence[int]]) -> list[Any]:
    """The rows of each part. verl takes every nested field apart anew for each of them: here it is done once."""
    from verl.utils import tensordict_utils as tu

    ragged = {key: field for key, field in batch.items() if getattr(field, "is_nested", False)}
    rows = {key: field.unbind() for key, field in ragged.items()}
    rest = batch.exclude(*ragged)
    found = [tu.index_select_tensor_dict(rest, list(part)) for part in parts]
    for selected, part in zip(found, parts, strict=True):
        for key, field in ragged.items():
            place = getattr(field, "_ragged_idx", field.dim() - 1)
            selected[key] = tu.nested_tensor_from_tensor_list([rows[key][row] for row in part], ragged_idx=place)
    return found


def _is_padded(batch: Any, dp_group: Any, options: dict[str, Any]) -> bool:
    """Whether rows will be padded, and one rank decides alone how many micro-batches there are."""
    from torch import distributed
    from verl.utils import tensordict_utils as tu

    padded = not tu.get_non_tensor_data(batch, "use_remove_padding", True) and batch["input_ids"].is_nested
    asked = options.get("num_batches_divided_by") or options.get("min_num_micro_batch")
    alone = not distributed.is_initialized() or dp_group is None or distributed.get_world_size(dp_group) == 1
    return padded and not asked and alone and options.get("force_group_size", 1) == 1


def cut_by_length(lengths: Sequence[int], limit: int, start: int = START_TOKENS) -> list[list[int]]:
    """The rows in parts of at most ``limit`` tokens with padding, at the least tokens over all, ``start`` per part.

    The shortest path over the sorted rows: a part that ends with a row is as wide as that row.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    places = np.arange(len(order) + 1)
    costs, cuts = np.zeros(len(order) + 1), [0]  # the cheapest way to compute the first so many rows
    for end, row in enumerate(order, start=1):
        width = max(1, lengths[row])
        first = max(0, end - limit // width)
        totals = costs[first:end] + (end - places[first:end]) * width
        begin = first + int(totals.argmin())
        costs[end] = totals[begin - first] + start
        cuts.append(begin)
    parts, end = [], len(order)
    while end:
        parts.append(sorted(order[cuts[end] : end]))
        end = cuts[end]
    return parts[::-1]


ROWS_BY_LENGTH = Patch(
    name="rows-by-length",
    kind=Kind.SPEED,
    module="verl.workers.engine.utils",
    replaced={"rearrange_micro_batches": rows_by_length},
    written_for={"rearrange_micro_batches": ("2e384e734df9f191", "0aececd7f211c358")},
    reason="verl puts long rows beside short ones; rows of like length are padded less",
    changes="the order in which gradients are summed; the token limit of a micro-batch counts its padding",
    without="+42 %, and 27 % more memory",
    needless_when="verl sorts rows by length where it pads them",
)


# -- messages of the TransferQueue -------------------------------------------------------------------------------------


class PackedRows:
    """Rows of one field, pickled as one buffer. Rows that are ``kept`` are later freed one by one."""

    def __init__(self, rows: list[torch.Tensor], kept: bool) -> None:
        self._rows, self._kept = rows, kept

    def __reduce__(self) -> tuple[Function, tuple[Any, ...]]:
        import torch

        joined = torch.cat(self._rows)
        lengths = np.fromiter(map(len, self._rows), dtype=np.int64, count=len(self._rows))
        numbers, dtype = bytearray(joined.view(torch.uint8).numpy()), str(joined.dtype).removeprefix("torch.")
        return unpack, (numbers, dtype, lengths.tobytes(), self._kept)


def unpack(numbers: bytearray, dtype: str, lengths: bytes, kept: bool) -> list[torch.Tensor]:
    """Return the rows: kept ones with memory of their own, the others as views of the buffer."""
    import torch

    PACKED_ROWS.apply()
    kind = getattr(torch, dtype)
    joined = torch.frombuffer(numbers, dtype=kind) if numbers else torch.empty(0, dtype=kind)
    rows = joined.split(np.frombuffer(lengths, dtype=np.int64).tolist())
    return [row.clone() for row in rows] if kept else list(rows)


def packed(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its short rows packed and everything else unchanged."""
    body = message.get("body")
    if not isinstance(body, dict) or not isinstance(data := body.get("data"), dict):
        return message
    kept = message.get("request_type") == PUT
    fields = {name: PackedRows(rows, kept) if _are_short_rows(rows) else rows for name, rows in data.items()}
    return {**message, "body": {**body, "data": fields}}


def _are_short_rows(values: Any) -> bool:
    import torch

    first = values[0] if isinstance(values, list) and len(values) >= FEWEST else None
    if type(first) is not torch.Tensor:
        return False
    alike = all(type(row) is torch.Tensor and row.dtype is first.dtype and row.dim() == 1 for row in values)
    return alike and all(row.device.type == "cpu" and row.nbytes <= LONGEST for row in values)


@around
def pack_rows(original: Function, self: Any, obj: Any) -> Any:
    """Encode a message with its short rows packed."""
    return original(self, packed(obj) if isinstance(obj, dict) else obj)


PACKED_ROWS = Patch(
    name="packed-rows",
    kind=Kind.SPEED,
    module="transfer_queue.utils.serial_utils",
    replaced={"MsgpackEncoder.encode": pack_rows},
    written_for={"MsgpackEncoder.encode": "4def6c228f01b200"},
    reason="the TransferQueue sends every row of every field as a message part of its own; short rows are one buffer",
    changes="nothing: the reader gets the same rows",
    without="+5 to +6 %",
    needless_when="the TransferQueue sends the rows of a field as one buffer with their lengths",
)
