"""Decode attention and index scores as Triton kernels, straight from packed pages.

attend: one program for 16 heads of a sequence; it walks its rows 32 at a time, reads 584 bytes a row once, keeps a
running maximum and sum, and ends with the sink. fp8 values times a power of two and bf16 values are exact in bf16, so
only queries and weights are rounded for the products; each is split into a high and a low bf16 half, which leaves
errors near fp32's. index_scores: one program a page of 64 keys, 8448 bytes read; the keys' fp32 scales are applied
behind the product. Layouts: common/kv/layout.py.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.attention import PackedRows
from common.kv.layout import C4_PAGE, INDEX_PAGE

_HEADS = 16
_ROWS = 32
# Triton's interpreter, which the tests use where there is no GPU, multiplies bf16 as integers.
_PRODUCT = tl.float32 if os.environ.get("TRITON_INTERPRET") == "1" else tl.bfloat16


@triton.jit
def _halves_dot(left, right, total):
    """left [m, k] fp32 times right [k, n], added to total; where right is bf16, as the product of bf16 halves."""
    high = left.to(right.dtype)
    total = tl.dot(high, right, total)
    if right.dtype == tl.bfloat16:
        low = (left - high.to(tl.float32)).to(right.dtype)
        total = tl.dot(low, right, total)
    return total


@triton.jit
def _walk(
    q_nope, q_rope, largest, total, acc_nope, acc_rope, pages, places, count, page_bytes, rows_log2,
    HEADS: tl.constexpr, ROWS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, 512)
    rope_column = tl.arange(0, 64)
    within = (1 << rows_log2) - 1
    begin = 0
    while begin < count:
        at = begin + tl.arange(0, ROWS)
        place = tl.load(places + at, mask=at < count, other=-1)
        there = place >= 0
        safe = tl.where(there, place, 0)
        page = pages + (safe >> rows_log2) * page_bytes
        row = safe & within
        data = page + row * 576
        scales = page + (tl.full([ROWS], 576, tl.int64) << rows_log2) + row * 8
        seen = there[:, None] & (column < 448)[None, :]
        raw = tl.load(data[:, None] + column[None, :], mask=seen, other=0).to(tl.int32)
        exponent = tl.load(scales[:, None] + (column // 64)[None, :], mask=seen, other=0).to(tl.int32)
        # e4m3 by its fields, see common/kernels/cuda/unpack.cu.
        size = raw & 0x7F
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
        value = tl.where((raw & 0x80) != 0, -value, value)
        value = value * (exponent << 23).to(tl.float32, bitcast=True)
        nope = tl.where(seen, value, 0.0).to(PRODUCT)
        halves = (data + 448).to(tl.pointer_type(tl.uint16))[:, None] + rope_column[None, :]
        bits = tl.load(halves, mask=there[:, None], other=0).to(tl.int32) << 16
        rope = bits.to(tl.float32, bitcast=True).to(PRODUCT)
        scores = tl.zeros([HEADS, ROWS], tl.float32)
        scores = _halves_dot(q_nope, tl.trans(nope), scores)
        scores = _halves_dot(q_rope, tl.trans(rope), scores)
        scores = tl.where(there[None, :], scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        # A block without rows leaves everything as it was.
        base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        acc_nope = _halves_dot(weights, nope, acc_nope * shrink[:, None])
        acc_rope = _halves_dot(weights, rope, acc_rope * shrink[:, None])
        largest = new
        begin += ROWS
    return largest, total, acc_nope, acc_rope


@triton.jit
def _attend(
    queries, sinks, out, heads,
    near_pages, near_places, near_counts, near_width, near_bytes, near_log2,
    far_pages, far_places, far_counts, far_width, far_bytes, far_log2,
    HAS_FAR: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    column = tl.arange(0, 512)
    rope_column = tl.arange(0, 64)
    query = queries + (b * heads + head)[:, None] * 512
    q_nope = tl.load(query + column[None, :], mask=real[:, None] & (column < 448)[None, :], other=0.0)
    q_rope = tl.load(query + 448 + rope_column[None, :], mask=real[:, None], other=0.0)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc_nope = tl.zeros([HEADS, 512], tl.float32)
    acc_rope = tl.zeros([HEADS, 64], tl.float32)
    count = tl.minimum(tl.load(near_counts + b), near_width).to(tl.int32)
    largest, total, acc_nope, acc_rope = _walk(
        q_nope, q_rope, largest, total, acc_nope, acc_rope, near_pages, near_places + b * near_width, count, near_bytes,
        near_log2, HEADS, ROWS, PRODUCT,
    )  # fmt: skip
    if HAS_FAR:
        count = tl.minimum(tl.load(far_counts + b), far_width).to(tl.int32)
        largest, total, acc_nope, acc_rope = _walk(
            q_nope, q_rope, largest, total, acc_nope, acc_rope, far_pages, far_places + b * far_width, count, far_bytes,
            far_log2, HEADS, ROWS, PRODUCT,
        )  # fmt: skip
    sink = tl.load(sinks + head, mask=real, other=0.0)
    new = tl.maximum(largest, sink)
    shrink = tl.exp(largest - new)
    divisor = total * shrink + tl.exp(sink - new)
    share = (shrink / divisor)[:, None]
    target = out + (b * heads + head)[:, None] * 512
    tl.store(target + column[None, :], acc_nope * share, mask=real[:, None] & (column < 448)[None, :])
    tl.store(target + 448 + rope_column[None, :], acc_rope * share, mask=real[:, None])


@triton.jit
def _index_scores(
    queries, head_weights, pages, table, counts, out, heads, width, page_bytes, HEADS: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    count = tl.load(counts + b)
    entry = tl.arange(0, 64)
    target = out + b * width * 64 + place * 64 + entry
    scores = tl.full([64], float("-inf"), tl.float32)
    if place * 64 < count:
        page = pages + tl.load(table + b * width + place) * page_bytes
        column = tl.arange(0, 128)
        raw = tl.load(page + entry[:, None] * 128 + column[None, :]).to(tl.int32)
        size = raw & 0x7F
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
        keys = tl.where((raw & 0x80) != 0, -value, value).to(PRODUCT)
        scales = tl.load((page + 8192).to(tl.pointer_type(tl.float32)) + entry)
        total = tl.zeros([64], tl.float32)
        begin = 0
        while begin < heads:
            head = begin + tl.arange(0, HEADS)
            real = head < heads
            q = tl.load(queries + (b * heads + head)[:, None] * 128 + column[None, :], mask=real[:, None], other=0.0)
            w = tl.load(head_weights + b * heads + head, mask=real, other=0.0)
            products = _halves_dot(q, tl.trans(keys), tl.zeros([HEADS, 64], tl.float32))
            products = tl.maximum(products * scales[None, :], 0.0)
            total += tl.sum(products * w[:, None], 0)
            begin += HEADS
        scores = tl.where(place * 64 + entry < count, total, float("-inf"))
    tl.store(target, scores)


class TritonDecodeAttention:
    """DecodeAttention on a CUDA device."""

    def attend(self, queries: Tensor, sinks: Tensor, near: PackedRows, far: PackedRows | None) -> Tensor:
        """See DecodeAttention.attend."""
        queries = queries.contiguous()
        batch, heads, width = queries.shape
        if width != 512 or queries.dtype != torch.float32:
            raise ValueError(f"queries must be [B, H, 512] fp32, got {list(queries.shape)} {queries.dtype}")
        for part in (near, far):
            if part is not None and (part.places.shape[0] != batch or not part.places.is_contiguous()):
                raise ValueError(f"places must be contiguous [{batch}, n], got {list(part.places.shape)}")
        out = torch.empty_like(queries)
        other = near if far is None else far
        _attend[(batch, triton.cdiv(heads, _HEADS))](
            queries, sinks, out, heads, *_arguments(near), *_arguments(other), HAS_FAR=far is not None, HEADS=_HEADS,
            ROWS=_ROWS, PRODUCT=_PRODUCT, num_warps=4,
        )  # fmt: skip
        return out

    def index_scores(
        self, queries: Tensor, head_weights: Tensor, pages: Tensor, table: Tensor, counts: Tensor
    ) -> Tensor:
        """See DecodeAttention.index_scores."""
        queries, head_weights = queries.contiguous(), head_weights.contiguous()
        batch, heads, _ = queries.shape
        width = table.shape[1]
        out = queries.new_empty(batch, width * INDEX_PAGE.rows)
        _index_scores[(batch, width)](
            queries, head_weights, pages, table, counts, out, heads, width, INDEX_PAGE.page_bytes, HEADS=_HEADS,
            PRODUCT=_PRODUCT, num_warps=4,
        )  # fmt: skip
        return out


def _arguments(rows: PackedRows) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
    log2 = rows.layout.rows.bit_length() - 1
    if rows.layout.data_bytes != C4_PAGE.data_bytes or 1 << log2 != rows.layout.rows:
        raise ValueError(f"{rows.layout} holds no rows of 576 bytes, or no power of two of them a page")
    return rows.pages, rows.places, rows.counts, rows.places.shape[1], rows.layout.page_bytes, log2
