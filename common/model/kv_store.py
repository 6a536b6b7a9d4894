"""The contract between the model and whoever keeps its KV.

The model computes rows; a store keeps them (raw, quantised, paged, on another device: the model does
not know) and hands back what attention reads. Two forms: one sequence and many tokens (prefill), many
sequences and one token each (decode). All tensors are fp32 on the model's device. What a store hands
back has gone through the store's quantisation, also for the rows just handed in: attention must see
the same values now and later.

Widths: a main row is head_dim (512), an index key index_head_dim (128). A raw compressor row is
[values | gates + ape]: for ratio 4 [vA vB gA gB] (4 * width), for ratio 128 [v g] (2 * width).
Names and formulas: DeepSeek-V4's compressed sparse attention; entry w of ratio m covers tokens
m*w ... m*w + m - 1 and, for m = 4, overlaps the window before it.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from torch import Tensor


class CacheKind(Enum):
    """Which compressed cache of a layer: main C4 rows, C4 index keys, main C128 rows."""

    C4 = "c4"
    INDEX = "index"
    C128 = "c128"

    @property
    def ratio(self) -> int:
        return 128 if self is CacheKind.C128 else 4


class PrefillKV(Protocol):
    """One sequence. `length` tokens are in the store; the chunk being computed is not counted
    until `advance`. Every layer of a chunk calls the extend methods once, in layer order."""

    length: int

    def extend_window(self, layer: int, rows: Tensor) -> Tensor:
        """Takes [T, 512] rows for positions length ... length+T-1.

        Returns [P+T, 512] for positions length-P ... length+T-1 with P = min(length, window-1).
        """
        ...

    def extend_state(self, layer: int, kind: CacheKind, rows: Tensor) -> Tensor:
        """Takes raw compressor rows [T, width] for positions length ... length+T-1.

        Returns [H+T, width]: H older raw rows, so that the first is at position
        max(0, 4*(length//4) - 4) for C4 and INDEX and at 128*(length//128) for C128.
        """
        ...

    def extend_entries(self, layer: int, kind: CacheKind, entries: Tensor) -> Tensor:
        """Takes the n >= 0 entries this chunk completed, [n, D] after norm and RoPE (index keys: before
        any Hadamard rotation), and returns all (length+T)//ratio entries of the sequence, [c, D].

        Index keys may come back in a rotated basis, see `rotate_index_queries`.
        """
        ...

    def rotate_index_queries(self, queries: Tensor) -> Tensor:
        """Index queries [..., 128] in the basis in which index keys are kept (Hadamard or identity).

        The rotation must be symmetric and orthonormal, as both are: a long chunk rotates the fewer keys back
        instead, with this same function.
        """
        ...

    def advance(self, tokens: int) -> None:
        """Called once after the last layer of a chunk: `length` grows by `tokens`."""
        ...


class FixedDecodeKV(Protocol):
    """Decode of B sequences, some of which may be padding, in fixed shapes: nothing depends on a value on the host, so
    that a step can be captured in a graph. `positions` [B] int64 as in DecodeKV; padding stands at 0 and reaches no
    memory of a request. Layers call in order, each method once. Every method takes and gives all B rows; an entry that
    a token does not complete is left out by the store."""

    positions: Tensor

    def extend_window(self, layer: int, rows: Tensor) -> None:
        """Takes [B, 512]; `attend` reads them."""
        ...

    def extend_state(self, layer: int, kind: CacheKind, rows: Tensor) -> Tensor:
        """Takes raw compressor rows [B, width]; returns [B, R, width] as DecodeKV does for closing rows."""
        ...

    def append_entries(self, layer: int, kind: CacheKind, entries: Tensor) -> None:
        """[B, D]; only those of tokens that close a window of `kind` count."""
        ...

    def select(self, layer: int, queries: Tensor, head_weights: Tensor) -> Tensor:
        """Index queries [B, Hi, Di], not yet in the keys' basis, and weights [B, Hi], to the C4 entries that each
        sequence reads: [B, topk] int64 ascending, -1 behind the last."""
        ...

    def attend(self, layer: int, queries: Tensor, sinks: Tensor, selected: Tensor | None) -> Tensor:
        """Queries [B, H, D], scaled, over the window and the layer's selected C4 or all C128 rows: [B, H, D]."""
        ...


class DecodeKV(Protocol):
    """B sequences, one token each. `positions` [B] int64 are the tokens being decoded now: sequence b
    holds positions[b] tokens, after this step one more. Layers call in order, each method once."""

    positions: Tensor

    def extend_window(self, layer: int, rows: Tensor) -> Tensor:
        """Takes [B, 512]; returns [B, window, 512]: slot j is position p - window + 1 + j.

        Slots before position 0 are zero and are masked by the model.
        """
        ...

    def extend_state(self, layer: int, kind: CacheKind, rows: Tensor, closing: Tensor) -> Tensor:
        """Takes raw compressor rows [B, width] and `closing` [n] int64, the batch rows whose token
        closes a window of `kind`.

        Returns [n, R, width] for those, oldest first: R = 8 for C4 and INDEX (positions p-7 ... p; those
        before 0 have value 0 and gate -inf), R = 128 for C128 (positions p-127 ... p).
        """
        ...

    def append_entries(self, layer: int, kind: CacheKind, closing: Tensor, entries: Tensor) -> None:
        """The entries [n, D] that the batch rows `closing` [n] completed with this token; for sequence b
        the entry's index is positions[b] // ratio. Visible to this very step."""
        ...

    def rotate_index_queries(self, queries: Tensor) -> Tensor:
        """As in PrefillKV."""
        ...

    def index_keys(self, layer: int) -> list[Tensor]:
        """For each sequence its index keys [c_padded, 128], the entry born in this step included;
        c_padded is c = (p+1)//4 rounded up to a multiple of 64 and the padding is zero."""
        ...

    def gather_c4(self, layer: int, entries: Tensor) -> Tensor:
        """C4 rows by entry id: [B, K] int64, -1 = none, to [B, K, 512]; rows for -1 are zero."""
        ...

    def c128_entries(self, layer: int) -> list[Tensor]:
        """For each sequence its C128 rows [n_padded, 512]; n = (p+1)//128 padded with zeros to a
        multiple of 64 (n = 0 gives an empty tensor)."""
        ...
