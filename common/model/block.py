"""One transformer block: hyper-connected attention, then hyper-connected experts."""

from __future__ import annotations

from torch import Tensor

from common.model.attention import Attention
from common.model.config import ModelConfig
from common.model.hyper_connection import HyperConnection
from common.model.moe import Experts
from common.model.norms import RmsNorm
from common.model.steps import DecodeStep, FixedStep, PrefillStep
from common.model.weights import WeightReader


class Block:
    """Layer `layer`; the streams are [rows, hc_mult, hidden] fp32, rows a multiple of 8."""

    def __init__(self, reader: WeightReader, layer: int, config: ModelConfig) -> None:
        prefix = f"layers.{layer}"
        eps = config.rms_norm_eps
        self._attention = Attention(reader, layer, config)
        self._experts = Experts(reader, f"{prefix}.ffn", config, hash_routed=layer < config.num_hash_layers)
        self._attention_streams = HyperConnection(reader, f"{prefix}.hc_attn", config)
        self._expert_streams = HyperConnection(reader, f"{prefix}.hc_ffn", config)
        self._attention_norm = RmsNorm(reader.vector(f"{prefix}.attn_norm.weight", config.hidden_size), eps)
        self._expert_norm = RmsNorm(reader.vector(f"{prefix}.ffn_norm.weight", config.hidden_size), eps)

    def __call__(self, streams: Tensor, token_ids: Tensor, step: PrefillStep | DecodeStep | FixedStep) -> Tensor:
        """The streams after this layer; `token_ids` [rows] is what hash routing looks up."""
        decoding = not isinstance(step, PrefillStep)
        read, mixing = self._attention_streams.read(streams, decoding=decoding)
        x = self._attention_norm(read)
        if isinstance(step, PrefillStep):
            attended = self._attention.prefill(x, step)
        elif isinstance(step, DecodeStep):
            attended = self._attention.decode(x, step)
        else:
            attended = self._attention.decode_fixed(x, step)
        streams = HyperConnection.write(streams, attended, mixing)
        read, mixing = self._expert_streams.read(streams, decoding=decoding)
        x = self._expert_norm(read)
        computed = self._experts(x, token_ids, decoding=decoding)
        return HyperConnection.write(streams, computed, mixing)
