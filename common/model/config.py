"""What a DeepSeek-V4 checkpoint's config.json says, in DeepSeek's own spelling or in transformers'.

Nothing is inferred: a field that is missing, of the wrong type or at odds with another is a ConfigError
that names it. Imports no torch, so that the router can read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

RATIOS = (0, 4, 128)
_LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


class ConfigError(ValueError):
    """config.json lacks a field, or says something that this engine can't serve or that contradicts itself."""


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions and constants; symbols in comments as in DeepSeek's papers."""

    vocab_size: int
    hidden_size: int  # d
    num_layers: int
    num_heads: int  # query heads; one key-value head
    head_dim: int  # 448 without and 64 with rotation, rotated ones last
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_heads: int
    index_head_dim: int
    index_topk: int  # K
    sliding_window: int  # tokens, the query's own included
    num_experts: int
    experts_per_token: int
    shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    hc_mult: int  # residual streams
    hc_eps: float
    hc_sinkhorn_iters: int
    compress_ratios: tuple[int, ...]  # one a layer
    num_hash_layers: int
    rms_norm_eps: float
    swiglu_limit: float
    clamp_shared_expert: bool
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_original_positions: int
    max_positions: int
    bos_token_id: int
    eos_token_id: tuple[int, ...]

    @classmethod
    def from_file(cls, directory: Path) -> ModelConfig:
        """Reads `directory`/config.json. Raises ConfigError, also where there is no such file."""
        path = directory / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; the model directory needs a config.json") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{path} holds a {type(data).__name__}, not an object")
        return cls.from_dict(cast("dict[str, Any]", data))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Reads a parsed config.json. Raises ConfigError."""
        fields = _Fields(data)
        fields.expect("model_type", "deepseek_v4")
        fields.expect("scoring_func", "sqrtsoftplus")
        fields.expect("norm_topk_prob", True)
        fields.expect("topk_method", "noaux_tc")
        fields.expect("hidden_act", "silu")
        fields.expect("num_key_value_heads", 1)
        fields.expect("tie_word_embeddings", False)
        fields.expect("attention_bias", False)
        num_layers = fields.integer("num_hidden_layers")
        head_dim = fields.integer("head_dim")
        rope = _rope(fields, head_dim)
        config = cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            num_layers=num_layers,
            num_heads=fields.integer("num_attention_heads"),
            head_dim=head_dim,
            q_lora_rank=fields.integer("q_lora_rank"),
            o_groups=fields.integer("o_groups"),
            o_lora_rank=fields.integer("o_lora_rank"),
            index_heads=fields.integer("index_n_heads"),
            index_head_dim=fields.integer("index_head_dim"),
            index_topk=fields.integer("index_topk"),
            sliding_window=fields.integer("sliding_window"),
            num_experts=fields.integer("n_routed_experts", "num_local_experts"),
            experts_per_token=fields.integer("num_experts_per_tok"),
            shared_experts=fields.integer("n_shared_experts"),
            moe_intermediate_size=fields.integer("moe_intermediate_size"),
            routed_scaling_factor=fields.number("routed_scaling_factor"),
            hc_mult=fields.integer("hc_mult"),
            hc_eps=fields.number("hc_eps"),
            hc_sinkhorn_iters=fields.integer("hc_sinkhorn_iters"),
            compress_ratios=_ratios(fields, num_layers),
            num_hash_layers=_hash_layers(fields, num_layers),
            rms_norm_eps=fields.number("rms_norm_eps"),
            swiglu_limit=fields.number("swiglu_limit"),
            clamp_shared_expert=fields.flag("swiglu_limit_shared_expert", True),
            max_positions=fields.integer("max_position_embeddings"),
            bos_token_id=fields.integer("bos_token_id", least=0),
            eos_token_id=_token_ids(fields, "eos_token_id"),
            **rope,
        )
        _check(config)
        return config

    def layers_of(self, *ratios: int) -> tuple[int, ...]:
        """Global ids of the layers with one of these ratios, ascending."""
        return tuple(layer for layer, ratio in enumerate(self.compress_ratios) if ratio in ratios)


class _Fields:
    """Typed access to a config's fields; says what is wrong with the field's name and value."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def get(self, *names: str) -> Any:
        """The value under the first of these spellings; two of them with different values contradict."""
        found = [(name, self.data[name]) for name in names if self.data.get(name) is not None]
        if not found:
            raise ConfigError(f"config field {' or '.join(names)} is missing")
        for name, value in found[1:]:
            if value != found[0][1]:
                raise ConfigError(f"config fields contradict: {found[0][0]} = {found[0][1]!r}, {name} = {value!r}")
        return found[0][1]

    def integer(self, *names: str, least: int = 1) -> int:
        value = self.get(*names)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"config field {names[0]} = {value!r} is not an integer")
        if value < least:
            raise ConfigError(f"config field {names[0]} = {value} is less than {least}")
        return value

    def number(self, *names: str) -> float:
        value = self.get(*names)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"config field {names[0]} = {value!r} is not a number")
        if not value > 0 or value == float("inf"):
            raise ConfigError(f"config field {names[0]} = {value!r} is not positive and finite")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.data.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config field {name} = {value!r} is not true or false")
        return value

    def expect(self, name: str, value: object) -> None:
        """The field may be absent, else it must be `value`: nothing else is served."""
        found = self.data.get(name)
        if found is not None and (found != value or isinstance(found, bool) != isinstance(value, bool)):
            raise ConfigError(f"config field {name} = {found!r}, but only {value!r} is supported")


def _ratios(fields: _Fields, num_layers: int) -> tuple[int, ...]:
    native = fields.data.get("compress_ratios")
    types = fields.data.get("layer_types")
    if native is None and types is None:
        raise ConfigError("config field compress_ratios (or layer_types) is missing")
    from_types: tuple[int, ...] | None = None
    if types is not None:
        names = _list(types, "layer_types")
        unknown = [name for name in names if name not in _LAYER_TYPES]
        if unknown:
            raise ConfigError(f"config field layer_types holds {unknown[0]!r}; known are {sorted(_LAYER_TYPES)}")
        from_types = tuple(_LAYER_TYPES[name] for name in names)[:num_layers]
        rates = fields.data.get("compress_rates")
        if rates is not None:
            for name, ratio in (("compressed_sparse_attention", 4), ("heavily_compressed_attention", 128)):
                if isinstance(rates, dict) and cast("dict[str, Any]", rates).get(name, ratio) != ratio:
                    raise ConfigError(f"config field compress_rates = {rates!r}, but {name} must be {ratio}")
    ratios = from_types
    if native is not None:
        values = _list(native, "compress_ratios")
        bad = [value for value in values if isinstance(value, bool) or value not in RATIOS]
        if bad:
            raise ConfigError(f"config field compress_ratios holds {bad[0]!r}; known are {list(RATIOS)}")
        ratios = tuple(values)[:num_layers]
        if from_types is not None and from_types != ratios:
            raise ConfigError(f"config fields contradict: compress_ratios = {ratios}, layer_types = {from_types}")
    if ratios is None or len(ratios) < num_layers:
        have = 0 if ratios is None else len(ratios)
        raise ConfigError(f"compress_ratios / layer_types name {have} layers, num_hidden_layers = {num_layers}")
    return ratios


def _hash_layers(fields: _Fields, num_layers: int) -> int:
    types = fields.data.get("mlp_layer_types")
    native = fields.data.get("num_hash_layers")
    if types is None:
        return min(fields.integer("num_hash_layers", least=0), num_layers)
    names = _list(types, "mlp_layer_types")[:num_layers]
    count = sum(name == "hash_moe" for name in names)
    if len(names) < num_layers or names != ["hash_moe"] * count + ["moe"] * (num_layers - count):
        raise ConfigError(f"config field mlp_layer_types = {names!r} is not hash_moe layers followed by moe layers")
    if native is not None and min(native, num_layers) != count:
        raise ConfigError(f"config fields contradict: num_hash_layers = {native}, mlp_layer_types has {count}")
    return count


def _rope(fields: _Fields, head_dim: int) -> dict[str, Any]:
    """The rotary fields, from rope_theta + rope_scaling (native) or nested rope_parameters."""
    nested = fields.data.get("rope_parameters")
    scaling = fields.data.get("rope_scaling")
    if isinstance(nested, dict) and "compress" in nested:
        parts = cast("dict[str, dict[str, Any]]", nested)
        main, compress = _Fields(parts["main"]), _Fields(parts["compress"])
        theta, compress_theta = main.number("rope_theta"), compress.number("rope_theta")
        yarn, where = compress, "rope_parameters.compress"
        partial = compress.data.get("partial_rotary_factor", fields.data.get("partial_rotary_factor"))
    else:
        source = scaling if scaling is not None else nested
        if not isinstance(source, dict):
            raise ConfigError("config field rope_scaling (or rope_parameters) is missing")
        theta, compress_theta = fields.number("rope_theta"), fields.number("compress_rope_theta")
        yarn, where = _Fields(cast("dict[str, Any]", source)), "rope_scaling"
        partial = fields.data.get("partial_rotary_factor")
    kind = yarn.data.get("rope_type", yarn.data.get("type"))
    if kind != "yarn":
        raise ConfigError(f"config field {where}.rope_type = {kind!r}, but only 'yarn' is supported")
    native_dim = fields.data.get("qk_rope_head_dim")
    from_partial = None if partial is None else round(partial * head_dim)
    if native_dim is None and from_partial is None:
        raise ConfigError("config field qk_rope_head_dim (or partial_rotary_factor) is missing")
    if native_dim is not None and from_partial is not None and native_dim != from_partial:
        raise ConfigError(
            f"config fields contradict: qk_rope_head_dim = {native_dim}, partial_rotary_factor = {partial}"
        )
    return {
        "rope_dim": native_dim if native_dim is not None else from_partial,
        "rope_theta": theta,
        "compress_rope_theta": compress_theta,
        "rope_factor": yarn.number("factor"),
        "rope_beta_fast": yarn.number("beta_fast"),
        "rope_beta_slow": yarn.number("beta_slow"),
        "rope_original_positions": yarn.integer("original_max_position_embeddings"),
    }


def _token_ids(fields: _Fields, name: str) -> tuple[int, ...]:
    value = fields.get(name)
    values: Sequence[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    if not values or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
        raise ConfigError(f"config field {name} = {value!r} is not a token id or a list of them")
    return tuple(values)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"config field {name} = {value!r} is not a list")
    return cast("list[Any]", value)


def _check(config: ModelConfig) -> None:
    """Contradictions between fields."""
    if not 0 < config.rope_dim <= min(config.head_dim, config.index_head_dim) or config.rope_dim % 2:
        raise ConfigError(
            f"config fields contradict: qk_rope_head_dim = {config.rope_dim}, head_dim = {config.head_dim}, "
            f"index_head_dim = {config.index_head_dim}"
        )
    if config.num_heads % config.o_groups:
        raise ConfigError(
            f"config fields contradict: num_attention_heads = {config.num_heads} is no multiple of "
            f"o_groups = {config.o_groups}"
        )
    if config.experts_per_token > config.num_experts:
        raise ConfigError(
            f"config fields contradict: num_experts_per_tok = {config.experts_per_token}, "
            f"n_routed_experts = {config.num_experts}"
        )
    if config.shared_experts != 1:
        raise ConfigError(f"config field n_shared_experts = {config.shared_experts}, but only 1 is supported")
    for name, value in (("bos_token_id", config.bos_token_id), *(("eos_token_id", e) for e in config.eos_token_id)):
        if value >= config.vocab_size:
            raise ConfigError(f"config fields contradict: {name} = {value}, vocab_size = {config.vocab_size}")
