"""DeepSeek-V4's forward pass: packed prefill of several sequences' chunks, and decode of one token each.

The KV of a sequence belongs to its store (common/model/kv_store.py). A token's result depends on its own
sequence alone: what else is in the batch changes no bit of it. Dense products see rows in multiples of 8,
attention sees shapes of its own sequence only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common.model.block import Block
from common.model.config import ModelConfig
from common.model.hyper_connection import HyperHead
from common.model.kv_store import DecodeKV, FixedDecodeKV, PrefillKV
from common.model.norms import RmsNorm
from common.model.pipe import Pipe
from common.model.rope import Rotary
from common.model.steps import DecodeStep, FixedStep, PrefillStep, decode_step, fixed_step, prefill_step
from common.model.weights import DequantiseMode, Weight, WeightReader, padded_rows

Logits = Literal["none", "last", "all"]


@dataclass(frozen=True)
class PrefillChunk:
    """The next tokens of one sequence: `token_ids` [T] int64 for positions kv.length ... kv.length + T - 1."""

    token_ids: Tensor
    kv: PrefillKV
    logits: Logits = "last"


class DeepSeekV4Model:
    """The model on one device.

    `weights` maps native tensor names to tensors or quantised weights. Matrices are multiplied in
    `compute_dtype`; norms, rotary positions, hyper-connections, routing, compressor softmax and attention are
    fp32. `dequantise_weights`: "at_load" keeps quantised matrices dense in the compute dtype (fast; the choice
    while they fit in memory), "per_use" keeps them as stored and rebuilds each for every product.

    Errors: ValueError naming a missing or misshapen tensor.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype = torch.float32,
        dequantise_weights: DequantiseMode = "at_load",
        layers: Sequence[int] | None = None,
    ) -> None:
        """`layers`: the consecutive global ids that this process computes, as one stage of several; None: all."""
        self.config = config
        mine = list(range(config.num_layers)) if layers is None else list(layers)
        self._is_first, self._is_last = mine[0] == 0, mine[-1] == config.num_layers - 1
        self.device = torch.device(device)
        reader = WeightReader(weights, self.device, compute_dtype, dequantise_weights)
        with torch.inference_mode():
            self._embedding = reader.vector("embed.weight", config.vocab_size, config.hidden_size)
            self._blocks = [Block(reader, layer, config) for layer in mine]
            self._join = HyperHead(reader, config)
            self._norm = RmsNorm(reader.vector("norm.weight", config.hidden_size), config.rms_norm_eps)
            self._head = reader.dense(("head.weight", config.vocab_size, config.hidden_size))
            self._rotary = Rotary(config, self.device)
        self._ratios = tuple(sorted(set(config.compress_ratios)))

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PrefillChunk], pipe: Pipe | None = None) -> list[Tensor | None]:
        """Computes the chunks in one pass and advances their stores.

        Returns for each chunk logits fp32: None for "none", [vocab] for "last", [T, vocab] for "all". A stage takes
        its input from `pipe` unless it is the first; unless it is the last it hands its output on and returns None
        for every chunk.
        Errors: ValueError for no or an empty chunk, a store given twice, a token id outside the vocabulary or a
        position behind max_positions; nothing has been written to a store then.
        """
        counts = self._check_chunks(chunks)
        total = sum(counts)
        rows = padded_rows(total)
        token_ids = torch.zeros(rows, dtype=torch.int64, device=self.device)
        torch.cat([chunk.token_ids.to(self.device) for chunk in chunks], out=token_ids[:total])
        self._check_token_ids(token_ids)
        step = prefill_step(self._rotary, [chunk.kv for chunk in chunks], counts, rows, self._ratios)
        if pipe is None or self._is_first:
            streams = self._embed(token_ids)
        else:
            streams = pipe.receive(rows, self.config.hc_mult, self.config.hidden_size).to(self.device)
        streams = self._forward(streams, token_ids, step)
        for chunk, count in zip(chunks, counts, strict=True):
            chunk.kv.advance(count)
        if pipe is not None and not self._is_last:
            pipe.send(streams)
            return [None] * len(chunks)
        return self._chunk_logits(chunks, step, streams)

    @torch.inference_mode()
    def decode(self, token_ids: Tensor, kv: DecodeKV) -> Tensor:
        """One token each of B sequences: token_ids [B] int64 at kv.positions, to logits [B, vocab] fp32.

        Errors: ValueError for an empty batch, batch sizes that disagree, a token id outside the vocabulary or a
        position behind max_positions; nothing has been written to the store then.
        """
        batch = token_ids.shape[0]
        if token_ids.dim() != 1 or batch == 0 or kv.positions.shape != (batch,):
            raise ValueError(
                f"token ids of shape {tuple(token_ids.shape)} and positions of shape {tuple(kv.positions.shape)}; "
                "both must be [B] with B >= 1"
            )
        last = int(kv.positions.max())
        if int(kv.positions.min()) < 0 or last >= self.config.max_positions:
            raise ValueError(f"positions reach {last}; they must lie in 0 ... {self.config.max_positions - 1}")
        rows = padded_rows(batch)
        padded = torch.zeros(rows, dtype=torch.int64, device=self.device)
        padded[:batch] = token_ids
        self._check_token_ids(padded)
        step = decode_step(self._rotary, kv, rows, self._ratios, self.config.sliding_window, self.config.index_topk)
        streams = self._forward(self._embed(padded), padded, step)
        return self._logits(streams)[:batch]

    @torch.inference_mode()
    def decode_fixed(self, token_ids: Tensor, kv: FixedDecodeKV) -> Tensor:
        """As `decode` for token_ids [B] int64 on the device, B a multiple of 8, without a look at any value: the caller
        has checked ids and positions. What it launches can be captured in a graph. [B, vocab] fp32."""
        if token_ids.shape[0] != padded_rows(token_ids.shape[0]) or kv.positions.shape != token_ids.shape:
            raise ValueError(
                f"{token_ids.shape[0]} token ids and {kv.positions.shape[0]} positions; both must be a multiple of 8"
            )
        return self._logits(
            self._forward(self._embed(token_ids), token_ids, fixed_step(self._rotary, kv, self._ratios))
        )

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Residual streams [rows, n, d]."""
        return self._embedding[token_ids].unsqueeze(1).repeat(1, self.config.hc_mult, 1)

    def _forward(self, streams: Tensor, token_ids: Tensor, step: PrefillStep | DecodeStep | FixedStep) -> Tensor:
        for block in self._blocks:
            streams = block(streams, token_ids, step)
        return streams

    def _logits(self, streams: Tensor) -> Tensor:
        """[rows, n, d] to [rows, vocab] fp32."""
        return self._head(self._norm(self._join(streams)))

    def _chunk_logits(self, chunks: Sequence[PrefillChunk], step: PrefillStep, streams: Tensor) -> list[Tensor | None]:
        wanted: list[int] = []
        for chunk, segment in zip(chunks, step.segments, strict=True):
            if chunk.logits == "last":
                wanted.append(segment.stop - 1)
            elif chunk.logits == "all":
                wanted.extend(range(segment.start, segment.stop))
        if not wanted:
            return [None] * len(chunks)
        index = torch.zeros(padded_rows(len(wanted)), dtype=torch.int64, device=self.device)
        index[: len(wanted)] = torch.tensor(wanted, device=self.device)
        logits = self._logits(streams[index])
        found: list[Tensor | None] = []
        start = 0
        for chunk, segment in zip(chunks, step.segments, strict=True):
            if chunk.logits == "none":
                found.append(None)
            elif chunk.logits == "last":
                found.append(logits[start])
                start += 1
            else:
                found.append(logits[start : start + segment.tokens])
                start += segment.tokens
        return found

    def _check_chunks(self, chunks: Sequence[PrefillChunk]) -> list[int]:
        if not chunks:
            raise ValueError("prefill of no chunk")
        if len({id(chunk.kv) for chunk in chunks}) != len(chunks):
            raise ValueError("two chunks of one prefill share a KV store")
        for index, chunk in enumerate(chunks):
            if chunk.token_ids.dim() != 1 or chunk.token_ids.shape[0] == 0:
                raise ValueError(f"chunk {index} has token ids of shape {tuple(chunk.token_ids.shape)}, not [T >= 1]")
            if chunk.logits not in ("none", "last", "all"):
                raise ValueError(f"chunk {index} asks for logits {chunk.logits!r}, not 'none', 'last' or 'all'")
            end = chunk.kv.length + chunk.token_ids.shape[0]
            if end > self.config.max_positions:
                raise ValueError(
                    f"chunk {index} ends at {end} tokens; the model has {self.config.max_positions} positions"
                )
        return [chunk.token_ids.shape[0] for chunk in chunks]

    def _check_token_ids(self, token_ids: Tensor) -> None:
        low, high = (int(bound) for bound in torch.aminmax(token_ids))
        if low < 0 or high >= self.config.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.config.vocab_size}")
