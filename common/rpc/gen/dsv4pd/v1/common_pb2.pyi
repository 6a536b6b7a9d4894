from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REGION_KIND_UNSPECIFIED: _ClassVar[RegionKind]
    REGION_KIND_C4: _ClassVar[RegionKind]
    REGION_KIND_INDEX: _ClassVar[RegionKind]
    REGION_KIND_C128: _ClassVar[RegionKind]
    REGION_KIND_WINDOW: _ClassVar[RegionKind]
    REGION_KIND_STATE_C4: _ClassVar[RegionKind]
    REGION_KIND_STATE_INDEX: _ClassVar[RegionKind]
    REGION_KIND_STATE_C128: _ClassVar[RegionKind]

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_CONTEXT_TOO_LONG: _ClassVar[ErrorReason]
    ERROR_REASON_QUEUE_FULL: _ClassVar[ErrorReason]
    ERROR_REASON_POOL_EXHAUSTED: _ClassVar[ErrorReason]
    ERROR_REASON_LAYOUT_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_PREFILL_UNAVAILABLE: _ClassVar[ErrorReason]
    ERROR_REASON_PREFILL_FAILED: _ClassVar[ErrorReason]
    ERROR_REASON_TRANSFER_FAILED: _ClassVar[ErrorReason]
    ERROR_REASON_DIGEST_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_DEADLINE_EXCEEDED: _ClassVar[ErrorReason]
    ERROR_REASON_CANCELLED: _ClassVar[ErrorReason]
    ERROR_REASON_DUPLICATE_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_STALE_GENERATION: _ClassVar[ErrorReason]
    ERROR_REASON_DRAINING: _ClassVar[ErrorReason]
    ERROR_REASON_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL: _ClassVar[ErrorReason]
    ERROR_REASON_DECODE_UNAVAILABLE: _ClassVar[ErrorReason]
REGION_KIND_UNSPECIFIED: RegionKind
REGION_KIND_C4: RegionKind
REGION_KIND_INDEX: RegionKind
REGION_KIND_C128: RegionKind
REGION_KIND_WINDOW: RegionKind
REGION_KIND_STATE_C4: RegionKind
REGION_KIND_STATE_INDEX: RegionKind
REGION_KIND_STATE_C128: RegionKind
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_INVALID_REQUEST: ErrorReason
ERROR_REASON_CONTEXT_TOO_LONG: ErrorReason
ERROR_REASON_QUEUE_FULL: ErrorReason
ERROR_REASON_POOL_EXHAUSTED: ErrorReason
ERROR_REASON_LAYOUT_MISMATCH: ErrorReason
ERROR_REASON_PREFILL_UNAVAILABLE: ErrorReason
ERROR_REASON_PREFILL_FAILED: ErrorReason
ERROR_REASON_TRANSFER_FAILED: ErrorReason
ERROR_REASON_DIGEST_MISMATCH: ErrorReason
ERROR_REASON_DEADLINE_EXCEEDED: ErrorReason
ERROR_REASON_CANCELLED: ErrorReason
ERROR_REASON_DUPLICATE_REQUEST: ErrorReason
ERROR_REASON_STALE_GENERATION: ErrorReason
ERROR_REASON_DRAINING: ErrorReason
ERROR_REASON_NOT_FOUND: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason
ERROR_REASON_DECODE_UNAVAILABLE: ErrorReason

class RequestKey(_message.Message):
    __slots__ = ("request_id", "generation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class Incarnation(_message.Message):
    __slots__ = ("service", "id", "started_unix_ns")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    service: str
    id: str
    started_unix_ns: int
    def __init__(self, service: _Optional[str] = ..., id: _Optional[str] = ..., started_unix_ns: _Optional[int] = ...) -> None: ...

class LayerLayout(_message.Message):
    __slots__ = ("layer_id", "ratio")
    LAYER_ID_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    layer_id: int
    ratio: int
    def __init__(self, layer_id: _Optional[int] = ..., ratio: _Optional[int] = ...) -> None: ...

class KVLayout(_message.Message):
    __slots__ = ("protocol_version", "model_hash", "tokenizer_hash", "layers", "logical_page_tokens", "head_dim", "rope_dim", "index_head_dim", "index_topk", "sliding_window", "c4_rows_per_page", "c4_page_bytes", "index_rows_per_page", "index_page_bytes", "c128_rows_per_page", "c128_page_bytes", "window_rows_per_page", "window_page_bytes", "row_dtype", "index_dtype", "state_dtype", "vocab_size")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    ROPE_DIM_FIELD_NUMBER: _ClassVar[int]
    INDEX_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    INDEX_TOPK_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    C4_ROWS_PER_PAGE_FIELD_NUMBER: _ClassVar[int]
    C4_PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_ROWS_PER_PAGE_FIELD_NUMBER: _ClassVar[int]
    INDEX_PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    C128_ROWS_PER_PAGE_FIELD_NUMBER: _ClassVar[int]
    C128_PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_ROWS_PER_PAGE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROW_DTYPE_FIELD_NUMBER: _ClassVar[int]
    INDEX_DTYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_hash: str
    tokenizer_hash: str
    layers: _containers.RepeatedCompositeFieldContainer[LayerLayout]
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
    def __init__(self, protocol_version: _Optional[int] = ..., model_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LayerLayout, _Mapping]]] = ..., logical_page_tokens: _Optional[int] = ..., head_dim: _Optional[int] = ..., rope_dim: _Optional[int] = ..., index_head_dim: _Optional[int] = ..., index_topk: _Optional[int] = ..., sliding_window: _Optional[int] = ..., c4_rows_per_page: _Optional[int] = ..., c4_page_bytes: _Optional[int] = ..., index_rows_per_page: _Optional[int] = ..., index_page_bytes: _Optional[int] = ..., c128_rows_per_page: _Optional[int] = ..., c128_page_bytes: _Optional[int] = ..., window_rows_per_page: _Optional[int] = ..., window_page_bytes: _Optional[int] = ..., row_dtype: _Optional[str] = ..., index_dtype: _Optional[str] = ..., state_dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("layer_id", "kind", "base", "bytes", "item_bytes", "piece_bytes")
    LAYER_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ITEM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    layer_id: int
    kind: RegionKind
    base: int
    bytes: int
    item_bytes: int
    piece_bytes: int
    def __init__(self, layer_id: _Optional[int] = ..., kind: _Optional[_Union[RegionKind, str]] = ..., base: _Optional[int] = ..., bytes: _Optional[int] = ..., item_bytes: _Optional[int] = ..., piece_bytes: _Optional[int] = ...) -> None: ...

class TransferTicket(_message.Message):
    __slots__ = ("session", "receiver", "regions", "host_c4_pages", "logical_pages", "window_slot", "state_slot", "verify", "first_page")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    HOST_C4_PAGES_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_SLOT_FIELD_NUMBER: _ClassVar[int]
    STATE_SLOT_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    session: str
    receiver: Incarnation
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    host_c4_pages: _containers.RepeatedScalarFieldContainer[int]
    logical_pages: _containers.RepeatedScalarFieldContainer[int]
    window_slot: int
    state_slot: int
    verify: bool
    first_page: int
    def __init__(self, session: _Optional[str] = ..., receiver: _Optional[_Union[Incarnation, _Mapping]] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., host_c4_pages: _Optional[_Iterable[int]] = ..., logical_pages: _Optional[_Iterable[int]] = ..., window_slot: _Optional[int] = ..., state_slot: _Optional[int] = ..., verify: _Optional[bool] = ..., first_page: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "logit_bias", "logprobs", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("reason", "message", "field", "ours", "theirs", "retry_after_s", "not_begun")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    OURS_FIELD_NUMBER: _ClassVar[int]
    THEIRS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    NOT_BEGUN_FIELD_NUMBER: _ClassVar[int]
    reason: ErrorReason
    message: str
    field: str
    ours: str
    theirs: str
    retry_after_s: float
    not_begun: bool
    def __init__(self, reason: _Optional[_Union[ErrorReason, str]] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., ours: _Optional[str] = ..., theirs: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., not_begun: _Optional[bool] = ...) -> None: ...
