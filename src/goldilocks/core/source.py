"""Where prompts come from: random access by index, a key for each, and the order in which they are visited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from goldilocks.errors import require
from goldilocks.hashing import content_key, with_media
from goldilocks.types import Prompt


class Source(Protocol):
    """Anything with a length, prompts by index, and their keys as one array (read once, at the start)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt: ...

    def keys(self) -> np.ndarray: ...


class ListSource:
    """Prompts from a sequence of contents; the key is a hash of the content.

    ``readable``: the contents are the texts of the prompts, not only names for them. ``columns`` has further values of
    each prompt.
    """

    def __init__(
        self, contents: Sequence[Any], *, readable: bool = True, columns: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        self._contents = contents
        self._readable = readable
        self._columns = dict(columns or {})
        self._keys = np.fromiter((content_key(content) for content in contents), dtype=np.uint64, count=len(contents))

    def __len__(self) -> int:
        return len(self._contents)

    def __getitem__(self, index: int, /) -> Prompt:
        return Prompt(key=int(self._keys[index]), index=index, payload=self._contents[index])

    def keys(self) -> np.ndarray:
        return self._keys

    def texts(self) -> list[str]:
        """Return the texts of the prompts, for strata; empty texts if the contents are only names."""
        return [str(content) if self._readable else "" for content in self._contents]

    def column(self, name: str, key: str) -> list[Any]:
        """Return a column; ``key`` is the setting that names it."""
        known = ", ".join(self._columns) or "there is none"
        require(name in self._columns, key, name, f"a column of the data: {known}")
        return list(self._columns[name])


class KeyedPositions:
    """Finds the row of a remembered prompt in this run's source. The data may have been reordered since."""

    def __init__(self, keys: np.ndarray) -> None:
        self._keys = keys
        self._order: np.ndarray | None = None

    def find(self, keys: np.ndarray, hints: np.ndarray) -> np.ndarray:
        """Return the index of each key: its hint where the hint still holds, -1 for a prompt that is gone."""
        keys = np.asarray(keys, dtype=np.uint64)
        found = np.asarray(hints, dtype=np.int64).copy()
        inside = (found >= 0) & (found < len(self._keys))
        right = inside.copy()
        right[inside] = self._keys[found[inside]] == keys[inside]
        if right.all():
            return found
        found[~right] = -1
        if self._order is None:
            self._order = np.argsort(self._keys, kind="stable")
        if len(self._keys):
            places = np.minimum(np.searchsorted(self._keys, keys, sorter=self._order), len(self._keys) - 1)
            there = self._keys[self._order[places]] == keys
            found[~right & there] = self._order[places][~right & there]
        return found

    def find_one(self, key: int, hint: int) -> int:
        return int(self.find(np.array([key], dtype=np.uint64), np.array([hint]))[0])

    def load(self, state: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> None:
        """Fill columns with the values of a saved state; drop those of prompts that are gone from the data."""
        rows = self.find(state["keys"], state["rows"])
        for name, column in columns.items():
            column[:] = 0
            column[rows[rows >= 0]] = np.asarray(state[name])[rows >= 0]


def find_prompt(source: Source, positions: KeyedPositions, packed: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a packed group; an error if the prompt is gone from the data."""
    index = positions.find_one(packed["key"], packed["index"])
    if index < 0:
        raise ValueError(
            f"group {packed['uid']} of the saved state is about a prompt (key {packed['key']}) "
            f"that is not among the {len(source)} prompts of this data set"
        )
    return source[index]


class PromptOrder:
    """Indices into the source. ``next`` goes through them in shuffled order; ``free`` returns all not in hand.

    The order of an epoch is a function of the epoch alone, so the cursor is its only state.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        repeat: bool,
        order: Callable[[int], np.ndarray] | None = None,
        keys: np.ndarray | None = None,
    ) -> None:
        """``order`` returns the pass of each epoch; default: a permutation seeded by ``seed`` and the epoch.

        ``keys``: of the prompts, by which a saved state finds them; None: their places.
        """
        self.size = size
        self._keys = np.arange(size, dtype=np.uint64) if keys is None else keys
        self.epoch = 0
        self._position = 0
        self._order_of = order or (lambda epoch: np.random.default_rng([seed, epoch]).permutation(size))
        self._repeat = repeat
        self._held = np.zeros(size, dtype=np.uint16)
        self._order = self._order_of(self.epoch)

    def next(self, k: int) -> np.ndarray:
        """Return the next ``k`` of the pass; a new pass begins where it ends. Fewer when prompts may not repeat."""
        parts: list[np.ndarray] = []
        while k > 0:
            part = self._order[self._position : self._position + k]
            self._position += len(part)
            if not self._repeat:
                part = part[self._held[part] == 0]  # some were chosen from ``free`` before their turn
            k -= len(part)
            parts.append(part)
            if k > 0 and self._position >= len(self._order):  # a pass may leave prompts out
                if not self._repeat:
                    break
                require(len(self._order) > 0, "order", f"no prompt in epoch {self.epoch}", "one or more")
                self.epoch, self._position = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def is_free(self) -> np.ndarray:
        """Return for each index whether it is not in hand; without repeats, whether it was never handed out."""
        return np.asarray(self._held == 0)

    def free(self) -> np.ndarray:
        """Return every index that ``is_free``."""
        return np.flatnonzero(self.is_free())

    def claim(self, chosen: Iterable[int]) -> None:
        for index in chosen:
            self._held[index] += 1

    def release(self, index: int) -> None:
        """Mark an index as no longer in hand; without repeats it stays claimed for good."""
        if self._repeat:
            self._held[index] -= 1

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor and, without repeats, the prompts handed out. Holders of prompts claim them on loading."""
        spent = np.empty(0, dtype=np.int64) if self._repeat else np.flatnonzero(self._held)
        return {
            "epoch": self.epoch,
            "position": self._position,
            "spent": spent,
            "keys": self._keys[spent],
            "size": self.size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self.epoch)
        rows = KeyedPositions(self._keys).find(state["keys"], state["spent"])
        moved = state["size"] != self.size or not np.array_equal(rows, state["spent"])
        if moved and not self._repeat:  # other data: those not handed out may be anywhere in the pass
            self._position = 0
        self._held[:] = 0
        self._held[rows[rows >= 0]] = 1
        left = Counter(np.asarray(state["keys"]).tolist()) - Counter(self._keys[self._held > 0].tolist())
        for row in np.flatnonzero(self._held == 0) if left else ():  # of prompts that are alike, ``find`` has one row
            if left[key := int(self._keys[row])]:
                self._held[row], left[key] = 1, left[key] - 1


class IssuedVisits:
    """How many visits to each prompt were issued, in one flat array. The number of a visit seeds its sampling noise.

    Visits are counted when they are issued, not when they are judged: two visits to one prompt that are open at the
    same time have different numbers, and so different noise.
    """

    def __init__(self, keys: np.ndarray) -> None:
        self._keys = keys
        self._counts = np.zeros(len(keys), dtype=np.uint32)

    def number(self, index: int) -> int:
        """Count a visit that is issued now; return how many were issued before it."""
        before = int(self._counts[index])
        self._counts[index] += 1
        return before

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of visited prompts only: the file grows with the run, not with the data set."""
        rows = np.flatnonzero(self._counts)
        return {"keys": self._keys[rows], "rows": rows, "counts": self._counts[rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        KeyedPositions(self._keys).load(state, {"counts": self._counts})


class TablePrompts(ABC):
    """A ``Source`` over verl's data frame or TRL's data set. A key hashes the messages, the same for every trainer."""

    table: Any  # None where the data set has none

    def __init__(self, size: int) -> None:
        self._keys = np.fromiter(map(content_key, self.contents()), dtype=np.uint64, count=size)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int, /) -> Prompt:
        return Prompt(key=int(self._keys[index]), index=index)

    def keys(self) -> np.ndarray:
        return self._keys

    def contents(self) -> Iterable[Any]:
        """What a prompt's key is a hash of."""
        names = self.media()
        if not names:
            return self.messages()
        return map(with_media, self.messages(), zip(*(undecoded(self.table, name) for name in names), strict=True))

    def media(self) -> Sequence[str]:
        """The columns of images, films and sounds, if there are any."""
        return ()

    @abstractmethod
    def messages(self) -> Iterable[Any]:
        """The chat messages of each prompt, or its text."""

    def texts(self) -> list[str]:
        """The text of each prompt's messages, for strata."""
        return list(map(conversation_text, self.messages()))

    def column(self, name: str, key: str) -> list[Any]:
        """Return a column of the table, or of its ``extra_info``; ``key`` is the setting that names it."""
        columns = list(getattr(self.table, "column_names", ()))
        if name in columns:
            return list(self.table[name])
        infos = self.table["extra_info"] if "extra_info" in columns else []
        if any(name in (info or {}) for info in infos):
            return [(info or {}).get(name) for info in infos]
        known = ", ".join(sorted({*columns, *(one for info in infos for one in info or {})}))
        raise ValueError(f"{key}={name!r} is not accepted: a column of the data: {known}")


def conversation_text(messages: Any) -> str:
    """Return the contents of a conversation's messages, a line each."""
    if isinstance(messages, str):
        return messages
    return "\n".join(str(one.get("content") if isinstance(one, Mapping) else one) for one in messages)


def undecoded(table: Any, name: str) -> Iterator[Any]:
    """Yield a column of images as they are stored, one at a time: together they may not fit in memory.

    Arrow has them as they are stored. To cast a list of images would write a copy of the whole table to the disk.
    Of images that a transform makes, what it makes them of is yielded: the whole row.
    """
    if name not in getattr(table, "column_names", (name,)) and hasattr(table, "with_format"):
        return (row.to_pylist()[0] for row in table.with_format("arrow"))
    rows = table.select_columns(name) if hasattr(table, "select_columns") else table
    feature: Any = getattr(table, "features", {}).get(name)
    transformed = getattr(table, "format", {}).get("type") == "custom"
    if transformed or hasattr(getattr(feature, "feature", feature), "decode"):  # an image, or a list of images
        return (row[name][0].as_py() for row in rows.with_format("arrow"))
    return (row[name] for row in rows)
