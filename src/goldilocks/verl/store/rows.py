"""Rows in the TransferQueue: which a batch has, what is computed on them there, and how they are saved.

Saved with them are the answers of unfinished rollouts, which continue from there when the collector asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.transferqueue_utils import kv_batch_meta2batch_meta

from goldilocks.algorithms import Untrained, weigh_prompts_equally
from goldilocks.drive.rows import Place, RowStore
from goldilocks.runs.records import split_row_key
from goldilocks.types import Group, Request, Rollout
from goldilocks.verl.store.padding import nested_as
from goldilocks.verl.store.stored_rows import load_rows, save_rows

UNFINISHED = "unfinished"  # the folder of rollouts that were in flight
PARTITION = "train"  # where rollouts are stored in the TransferQueue

# The fields that a prompt's row carries from the backend to the agent loops.
ROLLOUTS = "__rollout_n__"  # how many sessions to run: verl's own name
FIRST = "__rollout_first__"  # the number of the first of them
VISIT_SEED = "__visit_seed__"  # the seed of the noise of all of them
ANSWERS = "__answers__"  # by index, the answers that were saved of unfinished rollouts

PLACEHOLDER = "dummy_tensor"  # verl's data set gives every row one, for batches without any tensor; nothing reads it

Payload = list[list[Any]]  # [key, tag] of each row of a rollout
SavedAnswer = list[Any]  # [uid, index, answer] of an unfinished rollout


class Tag(dict[str, Any]):
    """The tag of a row, of which nothing changes but whole values.

    The TransferQueue copies the tags of a batch, deeply, wherever one is made of another. Copies of this share values.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Tag:
        return Tag(self)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)  # in other processes it is any tag


class Unfinished:
    """The answers of rollouts in flight; ``answers`` asks the workers for them."""

    def __init__(self, answers: Callable[[], list[SavedAnswer]]) -> None:
        self._answers = answers
        self._loaded: dict[tuple[str, int], Any] = {}

    def save(self, folder: Path) -> None:
        """Write the answers of unfinished rollouts, also of those that were loaded and have not begun again."""
        waiting = [[uid, index, answer] for (uid, index), answer in self._loaded.items()]
        save_rows([*self._answers(), *waiting], folder)

    def load(self, folder: Path) -> Collection[tuple[str, int]]:
        """Load what ``save`` wrote; return the rollouts that can continue."""
        self._loaded = {(uid, index): answer for uid, index, answer in load_rows(folder)}
        return self._loaded.keys()

    def retain(self, alive: Collection[str]) -> None:
        """Forget the answers of every group but these."""
        self._loaded = {name: answer for name, answer in self._loaded.items() if name[0] in alive}

    def give(self, request: Request) -> dict[int, Any]:
        """Return the answers of the rollouts of a request, by index, each once."""
        names = ((request.uid, index) for index in range(request.first, request.first + request.n))
        return {name[1]: self._loaded.pop(name) for name in names if name in self._loaded}


class QueueRows(RowStore[Payload]):
    """The rows in the queue, by group. A row here is the payload of a rollout: the keys and tags of its rows."""

    def __init__(self, unfinished: Unfinished) -> None:
        self.unfinished = unfinished
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
        """Free the rows of every other group, but those that are left to verl."""
        gone = {key for key, _ in self._pairs(self._payloads.keys() - set(alive))}
        self._payloads = {uid: group for uid, group in self._payloads.items() if uid in alive}
        clear(gone - self._left)
        self._left -= gone
        self.unfinished.retain(alive)

    def _pairs(self, uids: Iterable[str]) -> Iterator[list[Any]]:
        """The key and the tag of each row of these groups."""
        return (pair for uid in uids for payload in self._payloads[uid].values() for pair in payload)

    def save(self, rollouts: Iterable[Rollout], folder: Path) -> None:
        """Copy the rows of these rollouts out of the queue."""
        pairs = [pair for rollout in rollouts for pair in rollout.payload]
        stored = tq.kv_batch_get(keys=[key for key, _ in pairs], partition_id=PARTITION) if pairs else []
        fields = [{name: _plain(value) for name, value in stored[place].items()} for place in range(len(pairs))]
        save_rows([[key, tag, row] for (key, tag), row in zip(pairs, fields, strict=True)], folder)
        self.unfinished.save(folder / UNFINISHED)

    def load(self, folder: Path) -> Collection[Place]:
        """Put what ``save`` wrote back into the queue, under the same keys; return the rollouts that can go on."""
        if rows := load_rows(folder):
            self._put(rows)
        return self.unfinished.load(folder / UNFINISHED)

    def _put(self, rows: list[Any]) -> None:
        keys, tags, fields = map(list, zip(*rows, strict=True))
        tq.kv_batch_put(keys=keys, tags=tags, fields=list_of_dict_to_tensordict(fields), partition_id=PARTITION)
        for key, tag in zip(keys, tags, strict=True):
            uid, index = split_row_key(key)
            self._payloads.setdefault(uid, {}).setdefault(index, []).append([key, tag])


def batch_of(groups: Iterable[Group]) -> KVBatchMeta:
    """The rows that are trained, of groups that were taken, group by group."""
    return _batch([pair for group in groups for rollout in group.trained for pair in rollout.payload])


def _batch(pairs: Payload) -> KVBatchMeta:
    return KVBatchMeta(partition_id=PARTITION, keys=[key for key, _ in pairs], tags=[Tag(tag) for _, tag in pairs])


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


def untrained_of(groups: Iterable[Group]) -> dict[str, list[Untrained]]:
    """The rollouts of each group that are not trained and count in its baseline."""
    found = {}
    for group in groups:
        trained = {rollout.index for rollout in group.trained}
        found[group.uid] = [Untrained(one.reward, one.tokens) for one in group.rollouts if one.index not in trained]
    return found


def padding_keys(batch: KVBatchMeta) -> list[str]:
    """The rows that verl added so that the workers can divide the batch."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding", False)]


# A worker's output for whole sequences: the part that is trained on has another name, or is in the metrics.
NOT_COMPUTED_WITH = ("log_probs", "entropy", PLACEHOLDER)


def tensor_fields(batch: KVBatchMeta, also: Iterable[str] = ()) -> list[str]:
    """The fields of all rows that are tensors, and those named; rows of one step have the same fields."""
    firsts = {tag.get("global_steps"): (key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True)}
    keys, tags = zip(*firsts.values(), strict=True)
    one_each = KVBatchMeta(partition_id=batch.partition_id, keys=list(keys), tags=list(tags))
    schema = kv_batch_meta2batch_meta(one_each).field_schema
    tensors = [name for name, about in schema.items() if not about["is_non_tensor"] or name in also]
    return [name for name in tensors if name not in NOT_COMPUTED_WITH]


def fill_log_probs(keys: list[str], value: float, *others: str) -> None:
    """Write ``value`` over all log-probs of these rows, and over their fields ``others``.

    NaN means that the update's own pass gives them. Rows of padding have a mask of zero and need any value.
    """
    if keys:
        mask = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["response_mask"])["response_mask"]
        values = torch.full_like(mask, value, dtype=torch.float32)
        fields = TensorDict(dict.fromkeys(["old_log_probs", *others], values), batch_size=len(keys))
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields)


def weigh_advantages(batch: KVBatchMeta, loss_agg_mode: str) -> None:
    """Scale the advantages so that each prompt weighs the same, however many rollouts it has."""
    fields = ["advantages", "response_mask", "uid"]
    stored = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=fields)
    uids = stored.pop("uid").tolist()
    nested_mask = stored["response_mask"]
    padded = stored.to_padded_tensor()
    weighed = weigh_prompts_equally(padded["advantages"], padded["response_mask"], uids, loss_agg_mode)
    advantages = TensorDict({"advantages": nested_as(weighed, nested_mask)}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=advantages)


def clear(keys: Iterable[str]) -> None:
    """Free these rows."""
    gone = list(keys)
    if gone:
        tq.kv_clear(keys=gone, partition_id=PARTITION)


def _plain(value: Any) -> Any:
    return value.data if isinstance(value, NonTensorData) else value
