"""The rows of rollouts in the TransferQueue: gathered into batches, freed, and copied into a checkpoint and back.

The answers of unfinished rollouts are saved with the rows; a rollout goes on from its answer when the collector asks
for it again.

On disk tensors, arrays, bytes and pictures are safetensors, the rest is JSON; loading runs no code. A row is any
nesting of dicts and lists. A tensor comes back as a tensor, an array of numbers as an array, bytes as bytes, a date,
datetime or decimal as itself and a picture pixel by pixel. Bytes and large tensors that several rows have, such as the
picture of their prompt, are stored once. Any other value cannot be saved, and the error names it.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import io
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from safetensors.torch import load_file, save_file
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.transferqueue_utils import kv_batch_meta2batch_meta

from goldilocks.drive.rows import Place, RowStore
from goldilocks.losses.advantages import Untrained
from goldilocks.runs.checkpoints import ARRAY, from_json, to_json
from goldilocks.runs.files import replacing, write_text
from goldilocks.types import Group, Request, Rollout, split_row_key

PARTITION = "train"  # of the TransferQueue, where rollouts are stored
UNFINISHED = "unfinished"  # the folder of saved answers in a checkpoint
PLACEHOLDER = "dummy_tensor"  # verl's data set gives every row one, for batches without any tensor; nothing reads it

Payload = list[list[Any]]  # [key, tag] of each row of a rollout
SavedAnswer = list[Any]  # [uid, index, answer] of an unfinished rollout

FILE_OF_TENSORS, FILE_OF_VALUES = "tensors.safetensors", "values.json"
TENSOR, BYTES, TIME, DECIMAL = "__tensor__", "__bytes__", "__time__", "__decimal__"
PNG, PIXELS = "__png__", "__pixels__"
SHARED = 1 << 14  # bytes of a tensor that rows may have in common; answers of usual lengths are smaller
AS_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")  # the modes that a PNG file keeps as they are


# -- tags --------------------------------------------------------------------------------------------------------------

VERSIONS = "versions"  # in the tag of a row by several policies: [version, how many tokens it wrote], in order

Versions = list[list[Any]]  # the same of any tokens; the version is None where it is not known


def oldest_and_newest(versions: Versions) -> dict[str, int | None]:
    """What a tag says of the policies that wrote a row."""
    known = [version for version, _ in versions if version is not None]
    return {"min_global_steps": min(known, default=None), "max_global_steps": max(known, default=None)}


def version_of(tag: dict[str, Any]) -> int:
    """The policy that wrote a row, in updates; the oldest of several policies.

    Without a version from the rollout server, it is the policy of the step that asked for the rollout.
    """
    version = tag.get("min_global_steps")
    return int(tag["global_steps"]) - 1 if version is None else int(version)


def newest_version_of(tag: dict[str, Any]) -> int:
    """The newest of the policies that wrote a row."""
    spans = tag.get(VERSIONS)
    return int(spans[-1][0]) if spans else version_of(tag)


def is_padding(tag: dict[str, Any]) -> bool:
    """Whether verl added the row so that the workers can divide the batch."""
    return bool(tag.get("is_padding", False))


def stale_tokens(tags: list[dict[str, Any]], policy: int, response_mask: torch.Tensor) -> torch.Tensor:
    """Whether each token [rows, tokens] was written by a policy older than ``policy``; False where the mask is 0."""
    stale = torch.tensor([version_of(tag) < policy for tag in tags]).unsqueeze(-1) & response_mask.bool()
    for row, tag in enumerate(tags):
        if spans := tag.get(VERSIONS):
            ages = [version < policy for version, count in spans for _ in range(count)]
            written = response_mask[row].nonzero().squeeze(-1)[: len(ages)]  # none in a row of padding
            stale[row, written] = torch.tensor(ages[: len(written)], dtype=torch.bool)
    return stale


# -- rows that wait ----------------------------------------------------------------------------------------------------


class QueueRows(RowStore[Payload]):
    """The rows in the queue, by group. What it is given and returns are payloads: the keys and tags of rows."""

    def __init__(self, unfinished: Callable[[], list[SavedAnswer]]) -> None:
        """``unfinished`` returns the answers of rollouts that have not ended, of the moment that is being saved."""
        self._unfinished = unfinished
        self._answers: dict[Place, Any] = {}  # that were loaded, and not given out yet
        self._payloads: dict[str, dict[int, Payload]] = {}
        self._left: set[str] = set()  # keys of rows that verl frees

    def put(self, place: Place, row: Payload) -> None:
        """Note that the rows of this rollout are in the queue: the worker has put them there."""
        self._payloads.setdefault(place[0], {})[place[1]] = row

    def get(self, places: Sequence[Place]) -> list[Payload]:
        return [self._payloads[uid][index] for uid, index in places]

    def waiting(self, but: Collection[str]) -> KVBatchMeta:
        """Return all rows but those with these keys."""
        return _batch([pair for pair in self._pairs(self._payloads) if pair[0] not in but])

    def leave(self, keys: Iterable[str]) -> None:
        """Note that verl frees these rows: the TransferQueue warns of each that is freed twice."""
        self._left |= {key for key, _ in self._pairs(self._payloads)}.intersection(keys)

    def retain(self, alive: Collection[str]) -> None:
        """Free the rows of every other group, but those that verl frees."""
        gone = {key for key, _ in self._pairs(self._payloads.keys() - set(alive))}
        self._payloads = {uid: group for uid, group in self._payloads.items() if uid in alive}
        clear(gone - self._left)
        self._left -= gone
        self._answers = {place: answer for place, answer in self._answers.items() if place[0] in alive}

    def give(self, request: Request) -> dict[int, Any]:
        """Return the loaded answers of the rollouts of a request, by index, each once."""
        places = ((request.uid, index) for index in range(request.first, request.first + request.n))
        return {place[1]: self._answers.pop(place) for place in places if place in self._answers}

    def _pairs(self, uids: Iterable[str]) -> Iterator[list[Any]]:
        return (pair for uid in uids for payload in self._payloads[uid].values() for pair in payload)

    def save(self, rollouts: Iterable[Rollout], folder: Path) -> None:
        """Copy the rows of these rollouts out of the queue, and the answers of unfinished ones."""
        pairs = [pair for rollout in rollouts for pair in rollout.payload]
        stored = tq.kv_batch_get(keys=[key for key, _ in pairs], partition_id=PARTITION) if pairs else []
        rows = []
        for place, (key, tag) in enumerate(pairs):
            fields = stored[place].items()
            plain = {name: value.data if isinstance(value, NonTensorData) else value for name, value in fields}
            rows.append([key, tag, plain])
        save_rows(rows, folder)
        waiting = [[uid, index, answer] for (uid, index), answer in self._answers.items()]
        save_rows([*self._unfinished(), *waiting], folder / UNFINISHED)

    def load(self, folder: Path) -> Collection[Place]:
        """Put what ``save`` wrote back into the queue, under the same keys; return the rollouts that can go on."""
        if rows := load_rows(folder):
            keys, tags, fields = map(list, zip(*rows, strict=True))
            tq.kv_batch_put(keys=keys, tags=tags, fields=list_of_dict_to_tensordict(fields), partition_id=PARTITION)
            for key, tag in zip(keys, tags, strict=True):
                uid, index = split_row_key(key)
                self._payloads.setdefault(uid, {}).setdefault(index, []).append([key, tag])
        self._answers = {(uid, index): answer for uid, index, answer in load_rows(folder / UNFINISHED)}
        return self._answers.keys()


# -- rows of a batch ---------------------------------------------------------------------------------------------------


def batch_of(groups: Iterable[Group]) -> KVBatchMeta:
    """The rows that are trained of these groups, group by group."""
    return _batch([pair for group in groups for rollout in group.trained for pair in rollout.payload])


def _batch(pairs: Payload) -> KVBatchMeta:
    return KVBatchMeta(partition_id=PARTITION, keys=[key for key, _ in pairs], tags=[dict(tag) for _, tag in pairs])


def untrained_of(groups: Iterable[Group]) -> dict[str, list[Untrained]]:
    """The rollouts of each group that are not trained and count in its baseline; none of groups trained whole."""
    found = {}
    for group in groups:
        trained = {rollout.index for rollout in group.trained}
        others = [Untrained(one.reward, one.tokens) for one in group.rollouts if one.index not in trained]
        if others:
            found[group.uid] = others
    return found


def padding_keys(batch: KVBatchMeta) -> list[str]:
    """The keys of the rows that verl added so that the workers can divide the batch."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if is_padding(tag)]


# Fields that no worker computes with. The first two are a worker's own output for whole sequences; the part of it that
# is trained on has another name, or is in the metrics.
NOT_COMPUTED_WITH = ("log_probs", "entropy", PLACEHOLDER)


def tensor_fields(batch: KVBatchMeta, also: Iterable[str] = ()) -> list[str]:
    """The fields of the rows that are tensors, and those named ``also``. Rows of one step have the same fields."""
    firsts = {tag.get("global_steps"): (key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True)}
    keys, tags = zip(*firsts.values(), strict=True)
    one_each = KVBatchMeta(partition_id=batch.partition_id, keys=list(keys), tags=list(tags))
    schema = kv_batch_meta2batch_meta(one_each).field_schema
    tensors = [name for name, about in schema.items() if not about["is_non_tensor"] or name in also]
    return [name for name in tensors if name not in NOT_COMPUTED_WITH]


@contextmanager
def copied(rows: KVBatchMeta, fields: list[str]) -> Iterator[KVBatchMeta]:
    """Lend copies of these fields of the rows."""
    copies = _batch([[f"copy_{key}", tag] for key, tag in zip(rows.keys, rows.tags, strict=True)])
    stored = tq.kv_batch_get(keys=rows.keys, partition_id=PARTITION, select_fields=fields)
    tq.kv_batch_put(keys=copies.keys, partition_id=PARTITION, fields=stored, tags=copies.tags)
    try:
        yield copies
    finally:
        clear(copies.keys)


def fill_log_probs(keys: list[str], value: float, *others: str) -> None:
    """Write ``value`` for every token into ``old_log_probs`` of these rows, and into their fields ``others``.

    NaN means: use the log-probs of the update's own pass. Rows of padding have a mask of zero, so any value will do.
    """
    if keys:
        mask = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["response_mask"])["response_mask"]
        values = torch.full_like(mask, value, dtype=torch.float32)
        fields = TensorDict(dict.fromkeys(["old_log_probs", *others], values), batch_size=len(keys))
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields)


def fill_with_zeros(keys: list[str], field: str) -> None:
    """Write zeros into a field of these rows."""
    if keys:
        before = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=[field])[field]
        fields = TensorDict({field: torch.zeros_like(before)}, batch_size=len(keys))
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields)


def clear(keys: Iterable[str]) -> None:
    gone = list(keys)
    if gone:
        tq.kv_clear(keys=gone, partition_id=PARTITION)


# -- rows on disk ------------------------------------------------------------------------------------------------------


def save_rows(rows: Sequence[Any], folder: Path) -> None:
    stored = _Stored({})
    text = json.dumps(to_json(rows, stored.put, stored.marks))
    with replacing(folder / FILE_OF_TENSORS) as file:
        save_file(stored.tensors, file)
    write_text(folder / FILE_OF_VALUES, text)


def load_rows(folder: Path) -> list[Any]:
    """Return what ``save_rows`` wrote."""
    stored = _Stored(load_file(folder / FILE_OF_TENSORS))
    return list(from_json(json.loads((folder / FILE_OF_VALUES).read_text()), stored.marks))


def check_columns(values: Iterable[tuple[str, Any]]) -> None:
    """Refuse data with a column that ``save_rows`` cannot write, by values that columns have."""
    stored = _Stored({})
    for name, value in values:
        try:
            to_json(value, stored.put, stored.marks)
        except ValueError as error:
            said = f"the training data's column {name!r} cannot be saved with groups that wait: {error}"
            raise ValueError(f"{said}; leave it out, or set trainer.save_freq=-1") from None


class _Stored:
    """The values that JSON lacks, each a tensor with a name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.marks: dict[str, Callable[[Any], Any]] = {
            TENSOR: tensors.__getitem__,
            ARRAY: lambda name: tensors[name].numpy(),
            BYTES: self._bytes,
            TIME: lambda text: (datetime.datetime if len(text) > 10 else datetime.date).fromisoformat(text),
            DECIMAL: decimal.Decimal,
            PNG: self._from_png,
            PIXELS: self._from_pixels,
        }

    def put(self, value: Any) -> Any:
        """Store a value and return the JSON that stands for it."""
        if isinstance(value, torch.Tensor):
            return {TENSOR: self._put_tensor(value)}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {ARRAY: self._put_tensor(torch.from_numpy(np.asarray(value, order="C")))}
        if isinstance(value, (bytes, bytearray)):
            return {BYTES: self._put_bytes(value)}
        if isinstance(value, datetime.date) and value == value:  # of which a datetime is one, and pandas' NaT
            precise = {"timespec": "microseconds"} if isinstance(value, datetime.datetime) else {}  # no nanoseconds
            return {TIME: value.isoformat(**precise)}
        if isinstance(value, decimal.Decimal):
            return {DECIMAL: str(value)}
        pil = sys.modules.get("PIL.Image")  # where PIL was never imported, nothing is a picture
        if pil is not None and isinstance(value, pil.Image):
            if value.mode in AS_PNG:
                value.save(file := io.BytesIO(), format="PNG")
                return {PNG: self._put_bytes(file.getvalue())}
            return {PIXELS: [value.mode, value.size, self._put_bytes(value.tobytes())]}
        return to_json(_plain(value), self.put, self.marks)

    def _put_tensor(self, tensor: torch.Tensor) -> str:
        """Store a large tensor under a name that is a function of it; the name of any other is a number."""
        whole, name = tensor.detach().cpu().contiguous(), str(len(self.tensors))
        if whole.nbytes >= SHARED:
            name = f"{whole.dtype}-{list(whole.shape)}-{_digest(whole.flatten().view(torch.uint8).numpy().data)}"
        if name not in self.tensors:
            self.tensors[name] = whole.clone()
        return name

    def _put_bytes(self, data: bytes | bytearray) -> str:
        name = f"bytes-{_digest(data)}"
        if name not in self.tensors:
            self.tensors[name] = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        return name

    def _bytes(self, name: str) -> bytes:
        return self.tensors[name].numpy().tobytes()

    def _from_png(self, name: str) -> Any:
        """Return the picture of a PNG file; no other format is opened."""
        from PIL import Image

        image = Image.open(io.BytesIO(self._bytes(name)), formats=("PNG",))
        image.load()
        return image

    def _from_pixels(self, about: Sequence[Any]) -> Any:
        from PIL import Image

        mode, size, name = about
        return Image.frombytes(mode, tuple(size), self._bytes(name))


def _digest(data: bytes | bytearray | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Return the plain form of a library's object: an array, a number, the fields of a model."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise ValueError(
        "a rollout has a field that is neither a tensor nor a JSON value, and neither bytes nor a picture: "
        f"{type(value).__name__} {value!r:.80}"
    )
