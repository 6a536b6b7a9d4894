"""The facts that both ends of a handover must share, and where two sets of them differ."""

from __future__ import annotations

from dataclasses import dataclass, fields

from common.kv.layout import C4_PAGE, C128_PAGE, INDEX_PAGE, LOGICAL_PAGE_TOKENS, WINDOW_PAGE
from common.model.config import ModelConfig

# 2: a ticket leaves out the pages that the receiver has.
PROTOCOL_VERSION = 2


@dataclass(frozen=True)
class HandoverLayout:
    """Field names are those of dsv4pd.v1.KVLayout; `ratios` is one a layer, by global layer id."""

    protocol_version: int
    model_hash: str
    tokenizer_hash: str
    ratios: tuple[tuple[int, int], ...]
    logical_page_tokens: int
    head_dim: int
    rope_dim: int
    index_head_dim: int
    index_topk: int
    sliding_window: int
    c4_rows_per_page: int
    c4_page_bytes: int
    index_rows_per_page: int
    index_page_bytes: int
    c128_rows_per_page: int
    c128_page_bytes: int
    window_rows_per_page: int
    window_page_bytes: int
    row_dtype: str
    index_dtype: str
    state_dtype: str
    vocab_size: int

    @classmethod
    def of(cls, config: ModelConfig, model_hash: str, tokenizer_hash: str) -> HandoverLayout:
        """The layout this build uses for a model."""
        return cls(
            protocol_version=PROTOCOL_VERSION,
            model_hash=model_hash,
            tokenizer_hash=tokenizer_hash,
            ratios=tuple(enumerate(config.compress_ratios)),
            logical_page_tokens=LOGICAL_PAGE_TOKENS,
            head_dim=config.head_dim,
            rope_dim=config.rope_dim,
            index_head_dim=config.index_head_dim,
            index_topk=config.index_topk,
            sliding_window=config.sliding_window,
            c4_rows_per_page=C4_PAGE.rows,
            c4_page_bytes=C4_PAGE.page_bytes,
            index_rows_per_page=INDEX_PAGE.rows,
            index_page_bytes=INDEX_PAGE.page_bytes,
            c128_rows_per_page=C128_PAGE.rows,
            c128_page_bytes=C128_PAGE.page_bytes,
            window_rows_per_page=WINDOW_PAGE.rows,
            window_page_bytes=WINDOW_PAGE.page_bytes,
            row_dtype="fp8_e4m3+ue8m0+bf16_rope",
            index_dtype="fp8_e4m3+fp32_scale+hadamard",
            state_dtype="fp32",
            vocab_size=config.vocab_size,
        )


@dataclass(frozen=True)
class Difference:
    field: str
    ours: str
    theirs: str


def differences(ours: HandoverLayout, theirs: HandoverLayout) -> list[Difference]:
    """Every field in which the two differ, in the order of declaration."""
    found: list[Difference] = []
    for field in fields(HandoverLayout):
        left, right = getattr(ours, field.name), getattr(theirs, field.name)
        if left != right:
            found.append(Difference(field.name, str(left), str(right)))
    return found
