"""Triton kernels for whole parts of a layer of one token per row, rounding where transformers' modules round.

``attend`` norms (where a model does) and rotates the queries and keys, writes the new keys and values into the cache,
and attends. ``add_norm`` is a residual with the norm after it, ``swiglu`` an activation with its product.
"""

# Triton's language has no types a checker could read.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from goldilocks.engine.kernels import _join

# A program of ``attend``: keys at a time, warps, and keys on the way. An H200's multiprocessor has room for twelve such
# programs, and for six of 64 keys and four warps, with which a step of SmolLM2 and 512 rows took 2 % longer.
_COLUMNS, _WARPS, _STAGES = 32, 1, 3
_PROGRAMS = 512  # programs that keep a large GPU busy: with few rows, each row's keys are split among several


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
def _attend(
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


def attend(
    projected: Tensor, angles: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, columns: Tensor, heads: Heads
) -> Tensor:
    """Write one token per row at ``columns`` of the cache, and attend from it to all columns up to its own.

    ``projected`` [rows, (heads + 2 · key heads) · size] has its queries, keys and values; ``angles`` the cosines and
    sines of every column. Returns [rows, heads · size].
    """
    rows, key_heads, length, size = len(projected), *keys.shape[1:]
    most = min(_PROGRAMS // (rows * key_heads), triton.cdiv(length, _COLUMNS), 64)
    splits = 1 << max(0, most.bit_length() - 1)
    out = projected.new_empty(rows, heads.queries * size)
    whole = splits == 1
    partial = out if whole else projected.new_empty(rows, heads.queries, splits, size, dtype=torch.float32)
    log_mass = out if whole else projected.new_empty(rows, heads.queries, splits, dtype=torch.float32)
    _attend[(rows, key_heads, splits)](
        projected, *angles, *(heads.norms or (projected, projected)), keys, values, columns, partial, log_mass,
        heads.eps, projected.stride(0), *keys.stride()[:3], *values.stride()[:3],
        HEADS=heads.queries, KEY_HEADS=key_heads, GROUP_PAD=max(16, triton.next_power_of_2(heads.queries // key_heads)),
        SIZE=size, SIZE_PAD=max(16, triton.next_power_of_2(size)), HALF_PAD=max(16, triton.next_power_of_2(size // 2)),
        NORM=heads.norms is not None, COLUMNS=_COLUMNS, SPLITS=splits,
        SCALE=heads.scaling, num_warps=_WARPS, num_stages=_STAGES,
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
