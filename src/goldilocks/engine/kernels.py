"""Triton kernels for what a decode step on a GPU does slowly without them, rounding where transformers rounds.

``write`` puts the new keys and values into their columns; ``attend`` reads of each row only what is there, whatever the
static length, each key once for all heads that share it; ``draw`` is ``decoder.draw`` reading the logits once.

Three are whole parts of a layer of one token per row. ``attend_layer`` norms (where a model does) and rotates the
queries and keys, writes the new keys and values into the cache, and attends. ``add_norm`` is a residual with the norm
after it, ``swiglu`` an activation with its product.

All work at fixed addresses without a host synchronisation, so they can be captured.
"""

# Triton's language has no types a checker could read.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from goldilocks.engine.decoder import BLOCK, Drawn

# A program of ``attend_layer``: keys at a time, warps, and keys on the way. An H200's multiprocessor has room for
# twelve such programs, and for six of 64 keys and four warps, where a step of SmolLM2 and 512 rows took 2 % longer.
_LAYER_COLUMNS, _LAYER_WARPS, _LAYER_STAGES = 32, 1, 3
_COLUMNS = 64  # keys that one program of ``attend`` holds at a time
_PROGRAMS = 512  # programs that keep a large GPU busy: with few rows, each row's keys are split among several


def _dense(states: Tensor) -> Tensor:
    """``states`` with its last dimension in one piece, as the kernels read it."""
    return states if states.stride(-1) == 1 else states.contiguous()


@triton.jit
def _write(
    new_keys, new_values, keys, values, columns,
    nk_row, nk_head, nv_row, nv_head, k_row, k_head, k_column, v_row, v_head, v_column,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.load(columns + row)
    d = tl.arange(0, KEY_PAD)
    key = tl.load(new_keys + row * nk_row + head * nk_head + d, mask=d < KEY)
    tl.store(keys + row * k_row + head * k_head + column * k_column + d, key, mask=d < KEY)
    d = tl.arange(0, VALUE_PAD)
    value = tl.load(new_values + row * nv_row + head * nv_head + d, mask=d < VALUE)
    tl.store(values + row * v_row + head * v_head + column * v_column + d, value, mask=d < VALUE)


def write(new_keys: Tensor, new_values: Tensor, keys: Tensor, values: Tensor, columns: Tensor) -> None:
    """``keys[row, :, columns[row]] = new_keys[row, :, 0]`` for every row of ``new_keys``, and likewise the values."""
    new_keys, new_values = _dense(new_keys), _dense(new_values)
    rows, heads, _, key_size = new_keys.shape
    value_size = new_values.shape[3]
    _write[(rows, heads)](
        new_keys, new_values, keys, values, columns,
        *new_keys.stride()[:2], *new_values.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        KEY=key_size, VALUE=value_size,
        KEY_PAD=triton.next_power_of_2(key_size), VALUE_PAD=triton.next_power_of_2(value_size), num_warps=1,
    )  # fmt: skip


@triton.jit
def _attend(
    query, keys, values, last, partial, log_mass,
    q_row, q_head, k_row, k_head, k_column, v_row, v_head, v_column,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(last + row) + 1
    share = tl.cdiv(tl.cdiv(length, COLUMNS), SPLITS) * COLUMNS
    begin = split * share
    end = tl.minimum(length, begin + share)
    g, dk, dv, t = tl.arange(0, GROUP_PAD), tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD), tl.arange(0, COLUMNS)
    heads = head * GROUP + g
    q = tl.load(
        query + row * q_row + heads[:, None] * q_head + dk[None, :],
        mask=(g < GROUP)[:, None] & (dk < KEY)[None, :], other=0.0,
    )  # fmt: skip
    k_base = keys + row * k_row + head * k_head
    v_base = values + row * v_row + head * v_head
    peak = tl.full([GROUP_PAD], -1e30, tl.float32)
    mass = tl.zeros([GROUP_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
    for start in range(begin, end, COLUMNS):
        column = start + t
        seen = column < end
        k = tl.load(
            k_base + column[None, :] * k_column + dk[:, None], mask=seen[None, :] & (dk < KEY)[:, None], other=0.0
        )
        score = tl.dot(q, k, input_precision="ieee") * SCALE
        score = tl.where(seen[None, :], score, -float("inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        fade = tl.exp(peak - higher)
        v = tl.load(
            v_base + column[:, None] * v_column + dv[None, :], mask=seen[:, None] & (dv < VALUE)[None, :], other=0.0
        )
        mass = mass * fade + tl.sum(weight, 1)
        total = total * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        peak = higher
    # A split past the end of its row has mass 0 and must not divide by it; its log mass takes it out of the sum.
    out = total / tl.where(mass > 0, mass, 1.0)[:, None]
    slot = (row * tl.num_programs(1) * GROUP + heads) * SPLITS + split
    tl.store(
        partial + slot[:, None] * VALUE + dv[None, :], out.to(partial.dtype.element_ty),
        mask=(g < GROUP)[:, None] & (dv < VALUE)[None, :],
    )  # fmt: skip
    if SPLITS > 1:
        tl.store(log_mass + slot, tl.where(mass > 0, peak + tl.log(mass), -float("inf")), mask=g < GROUP)


@triton.jit
def _join(partial, log_mass, out, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, SPLITS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, VALUE_PAD)
    mass = tl.load(log_mass + head * SPLITS + s)
    weight = tl.exp(mass - tl.max(mass, 0))
    parts = tl.load(partial + (head * SPLITS + s)[:, None] * VALUE + d[None, :], mask=(d < VALUE)[None, :], other=0.0)
    joined = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head * VALUE + d, joined.to(out.dtype.element_ty), mask=d < VALUE)


def attend(query: Tensor, keys: Tensor, values: Tensor, last: Tensor, scaling: float) -> Tensor:
    """One query token per row over the row's columns 0 to ``last``. Returns ``[rows, 1, heads, value size]``."""
    query = _dense(query)
    rows, heads, _, key_size = query.shape
    key_heads, length, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    group = heads // key_heads
    most = min(_PROGRAMS // (rows * key_heads), triton.cdiv(length, _COLUMNS), 64)
    splits = 1 << max(0, most.bit_length() - 1)
    out = query.new_empty(rows, 1, heads, value_size)
    whole = splits == 1
    partial = out if whole else query.new_empty(rows, heads, splits, value_size, dtype=torch.float32)
    log_mass = out if whole else query.new_empty(rows, heads, splits, dtype=torch.float32)
    value_pad = max(16, triton.next_power_of_2(value_size))
    _attend[(rows, key_heads, splits)](
        query, keys, values, last, partial, log_mass,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), KEY=key_size, VALUE=value_size,
        KEY_PAD=max(16, triton.next_power_of_2(key_size)), VALUE_PAD=value_pad, COLUMNS=_COLUMNS, SPLITS=splits,
        SCALE=scaling,
    )  # fmt: skip
    if not whole:
        _join[(rows * heads,)](
            partial, log_mass, out, VALUE=value_size, VALUE_PAD=value_pad, SPLITS=splits, num_warps=1
        )
    return out


@triton.jit
def _weigh(logits, temperature, peaks, masses, bests, vocabulary, l_row, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * l_row + index, mask=index < vocabulary, other=-float("inf")).to(tl.float32)
    x = x / tl.load(temperature + row)
    peak, best = tl.max(x, 0, return_indices=True)
    # A block that was cut away entirely has peak −inf: its weights are 0, not NaN.
    mass = tl.sum(tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak)), 0)
    tl.store(peaks + row * BLOCKS + block, peak)
    tl.store(masses + row * BLOCKS + block, mass)
    tl.store(bests + row * BLOCKS + block, block * BLOCK + best)


@triton.jit
def _first_above(weights, share, SIZE: tl.constexpr):
    """As in ``decoder``: the first index whose running weight exceeds the share, never one of weight zero."""
    index = tl.arange(0, SIZE)
    running = tl.cumsum(weights, 0)
    reached = (running > share * tl.max(running, 0)) & (weights > 0)
    first = tl.min(tl.where(reached, index, SIZE), 0)
    return tl.where(first < SIZE, first, tl.argmax(weights, 0))


@triton.jit
def _pick(
    logits, temperature, greedy, uniforms, peaks, masses, bests, tokens, log_probs, top_log_probs, vocabulary, l_row,
    BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, t = tl.arange(0, BLOCKS_PAD), tl.arange(0, BLOCK)
    peak = tl.load(peaks + row * BLOCKS + b, mask=b < BLOCKS, other=-float("inf"))
    mass = tl.load(masses + row * BLOCKS + b, mask=b < BLOCKS, other=0.0)
    top = tl.max(peak, 0)
    mass = mass * tl.exp(peak - top)
    log_total = tl.log(tl.sum(mass, 0))
    block = _first_above(mass, tl.load(uniforms + row * 2), BLOCKS_PAD)
    index = block * BLOCK + t
    x = tl.load(logits + row * l_row + index, mask=index < vocabulary, other=-float("inf")).to(tl.float32)
    x = x / tl.load(temperature + row)
    inside = _first_above(tl.exp(x - tl.max(x, 0)), tl.load(uniforms + row * 2 + 1), BLOCK)
    chosen = tl.sum(tl.where(t == inside, x, 0.0), 0)
    is_greedy = tl.load(greedy + row) != 0
    best = tl.load(bests + row * BLOCKS + tl.argmax(peak, 0))
    tl.store(tokens + row, tl.where(is_greedy, best, block * BLOCK + inside).to(tl.int64))
    tl.store(log_probs + row, tl.where(is_greedy, 0.0, chosen - top) - log_total)
    tl.store(top_log_probs + row, -log_total)


def draw(logits: Tensor, temperature: Tensor, greedy: Tensor, uniforms: Tensor) -> Drawn:
    """``decoder.draw`` on a GPU: one pass over the logits, then one block of each row again."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    peaks = logits.new_empty(rows, blocks, dtype=torch.float32)
    masses = torch.empty_like(peaks)
    bests = logits.new_empty(rows, blocks, dtype=torch.int32)
    _weigh[(rows, blocks)](
        logits, temperature, peaks, masses, bests, vocabulary, logits.stride(0), BLOCKS=blocks, BLOCK=BLOCK
    )
    tokens = logits.new_empty(rows, dtype=torch.long)
    log_probs, top_log_probs = peaks.new_empty(rows), peaks.new_empty(rows)
    _pick[(rows,)](
        logits, temperature, greedy, uniforms, peaks, masses, bests, tokens, log_probs, top_log_probs, vocabulary,
        logits.stride(0), BLOCKS=blocks, BLOCKS_PAD=triton.next_power_of_2(blocks), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return Drawn(tokens, log_probs, top_log_probs)


@triton.jit
def _norm(x1, x2, weight, d, eps, inside, kind: tl.constexpr, HALF: tl.constexpr):
    scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
    w1 = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(weight + HALF + d, mask=inside, other=0.0).to(tl.float32)
    first = (x1 * scale).to(kind).to(tl.float32) * w1
    second = (x2 * scale).to(kind).to(tl.float32) * w2
    return first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)


@triton.jit
def _turn(
    states, mask, cosines, sines, weight, eps, d,
    kind: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Both halves of rotated heads [heads, half]. transformers rounds each product and then the sum."""
    inside = (d < HALF)[None, :]
    x1 = tl.load(states, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(states + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        x1, x2 = _norm(x1, x2, weight, d[None, :], eps, inside, kind, HALF)
    c1 = tl.load(cosines + d[None, :], mask=inside, other=0.0).to(tl.float32)
    c2 = tl.load(cosines + HALF + d[None, :], mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(sines + d[None, :], mask=inside, other=0.0).to(tl.float32)
    s2 = tl.load(sines + HALF + d[None, :], mask=inside, other=0.0).to(tl.float32)
    first = (x1 * c1).to(kind).to(tl.float32) - (x2 * s1).to(kind).to(tl.float32)
    second = (x2 * c2).to(kind).to(tl.float32) + (x1 * s2).to(kind).to(tl.float32)
    return first.to(kind), second.to(kind)


@triton.jit
def _attend_layer(
    projected, cosines, sines, query_norm, key_norm, keys, values, columns, partial, log_mass, eps,
    p_row, k_row, k_head, k_column, v_row, v_head, v_column,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr, NORM: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    HALF: tl.constexpr = SIZE // 2
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    kind = keys.dtype.element_ty
    own = tl.load(columns + row)  # the new token's column
    g, h, d, t = tl.arange(0, GROUP_PAD), tl.arange(0, HALF_PAD), tl.arange(0, SIZE_PAD), tl.arange(0, COLUMNS)
    heads = head * GROUP + g
    cosines += own * SIZE
    sines += own * SIZE
    q1, q2 = _turn(
        projected + row * p_row + heads[:, None] * SIZE + h[None, :], (g < GROUP)[:, None] & (h < HALF)[None, :],
        cosines, sines, query_norm, eps, h, kind, HALF, NORM,
    )  # fmt: skip
    new = projected + row * p_row + (HEADS + head) * SIZE
    k1, k2 = _turn(new + h[None, :], (h < HALF)[None, :], cosines, sines, key_norm, eps, h, kind, HALF, NORM)
    value = tl.load(new + KEY_HEADS * SIZE + d, mask=d < SIZE, other=0.0)
    k_base = keys + row * k_row + head * k_head
    v_base = values + row * v_row + head * v_head
    peak = tl.full([GROUP_PAD], -1e30, tl.float32)
    mass = tl.zeros([GROUP_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD, SIZE_PAD], tl.float32)
    if split == 0:  # the new token goes to the cache and sees itself; no program reads its column
        place = k_base + own * k_column + h[None, :]
        tl.store(place, k1, mask=(h < HALF)[None, :])
        tl.store(place + HALF, k2, mask=(h < HALF)[None, :])
        tl.store(v_base + own * v_column + d, value, mask=d < SIZE)
        score = tl.sum(q1.to(tl.float32) * k1.to(tl.float32), 1) + tl.sum(q2.to(tl.float32) * k2.to(tl.float32), 1)
        peak = score * SCALE
        mass += 1.0
        total += value.to(tl.float32)[None, :]
    share = tl.cdiv(tl.cdiv(own, COLUMNS), SPLITS) * COLUMNS
    begin = split * share
    end = tl.minimum(own, begin + share)
    for start in range(begin, end, COLUMNS):
        column = start + t
        seen = column < end
        place = k_base + column[None, :] * k_column + h[:, None]
        inside = seen[None, :] & (h < HALF)[:, None]
        score = tl.dot(q1, tl.load(place, mask=inside, other=0.0), input_precision="ieee")
        score = tl.dot(q2, tl.load(place + HALF, mask=inside, other=0.0), score, input_precision="ieee") * SCALE
        score = tl.where(seen[None, :], score, -float("inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        fade = tl.exp(peak - higher)
        v = tl.load(
            v_base + column[:, None] * v_column + d[None, :], mask=seen[:, None] & (d < SIZE)[None, :], other=0.0
        )
        mass = mass * fade + tl.sum(weight, 1)
        total = total * fade[:, None] + tl.dot(weight.to(kind), v, input_precision="ieee")
        peak = higher
    # A split past the end of its row has mass 0 and must not divide by it; its log mass takes it out of the sum.
    out = total / tl.where(mass > 0, mass, 1.0)[:, None]
    slot = (row * HEADS + heads) * SPLITS + split
    tl.store(
        partial + slot[:, None] * SIZE + d[None, :], out.to(partial.dtype.element_ty),
        mask=(g < GROUP)[:, None] & (d < SIZE)[None, :],
    )  # fmt: skip
    if SPLITS > 1:
        tl.store(log_mass + slot, tl.where(mass > 0, peak + tl.log(mass), -float("inf")), mask=g < GROUP)


class Heads(NamedTuple):
    """How a layer attends: its number of query heads, its scale, and the norm of queries and keys where it has one."""

    queries: int
    scaling: float
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0


def attend_layer(
    projected: Tensor, angles: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, columns: Tensor, heads: Heads
) -> Tensor:
    """Write one token per row at ``columns`` of the cache, and attend from it to all columns up to its own.

    ``projected`` [rows, (heads + 2 · key heads) · size] has its queries, keys and values; ``angles`` the cosines and
    sines of every column. Returns [rows, heads · size].
    """
    rows, key_heads, length, size = len(projected), *keys.shape[1:]
    most = min(_PROGRAMS // (rows * key_heads), triton.cdiv(length, _LAYER_COLUMNS), 64)
    splits = 1 << max(0, most.bit_length() - 1)
    out = projected.new_empty(rows, heads.queries * size)
    whole = splits == 1
    partial = out if whole else projected.new_empty(rows, heads.queries, splits, size, dtype=torch.float32)
    log_mass = out if whole else projected.new_empty(rows, heads.queries, splits, dtype=torch.float32)
    _attend_layer[(rows, key_heads, splits)](
        projected, *angles, *(heads.norms or (projected, projected)), keys, values, columns, partial, log_mass,
        heads.eps, projected.stride(0), *keys.stride()[:3], *values.stride()[:3],
        HEADS=heads.queries, KEY_HEADS=key_heads, GROUP_PAD=max(16, triton.next_power_of_2(heads.queries // key_heads)),
        SIZE=size, SIZE_PAD=max(16, triton.next_power_of_2(size)), HALF_PAD=max(16, triton.next_power_of_2(size // 2)),
        NORM=heads.norms is not None, COLUMNS=_LAYER_COLUMNS, SPLITS=splits,
        SCALE=heads.scaling, num_warps=_LAYER_WARPS, num_stages=_LAYER_STAGES,
    )  # fmt: skip
    if not whole:
        pad = triton.next_power_of_2(size)
        _join[(rows * heads.queries,)](partial, log_mass, out, VALUE=size, VALUE_PAD=pad, SPLITS=splits, num_warps=1)
    return out


@triton.jit
def _add_norm(delta, residual, weight, out, eps, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, SIZE_PAD)
    kind = out.dtype.element_ty
    x = tl.load(delta + row * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    x += tl.load(residual + row * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    tl.store(residual + row * SIZE + d, x.to(kind), mask=d < SIZE)
    x = x.to(kind).to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    w = tl.load(weight + d, mask=d < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + d, (scaled.to(kind).to(tl.float32) * w).to(kind), mask=d < SIZE)


def add_norm(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``delta`` to ``residual`` in place, and return the RMS norm of the sum."""
    rows, size = residual.shape
    out = torch.empty_like(residual)
    pad = triton.next_power_of_2(size)
    _add_norm[(rows,)](delta, residual, weight, out, eps, SIZE=size, SIZE_PAD=pad, num_warps=4 if pad > 256 else 1)
    return out


@triton.jit
def _swiglu(both, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kind = out.dtype.element_ty
    gate = tl.load(both + row * 2 * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * SIZE + SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + row * SIZE + d, (active * up).to(kind), mask=d < SIZE)


def swiglu(both: Tensor) -> Tensor:
    """``silu(gate) · up`` of rows that hold the two side by side."""
    rows, size = len(both), both.shape[1] // 2
    out = both.new_empty(rows, size)
    block = min(2048, triton.next_power_of_2(size))
    _swiglu[(rows, triton.cdiv(size, block))](both, out, SIZE=size, BLOCK=block)
    return out
