from common.rpc.gen.dsv4pd.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("caller", "layout")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Incarnation
    layout: _common_pb2.KVLayout
    def __init__(self, caller: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("callee", "layout")
    CALLEE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    callee: _common_pb2.Incarnation
    layout: _common_pb2.KVLayout
    def __init__(self, callee: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("key", "expected_incarnation", "token_ids", "sampling", "ticket", "queue_timeout_s", "prefill_timeout_s", "transfer_timeout_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    expected_incarnation: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    ticket: _common_pb2.TransferTicket
    queue_timeout_s: float
    prefill_timeout_s: float
    transfer_timeout_s: float
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., expected_incarnation: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., ticket: _Optional[_Union[_common_pb2.TransferTicket, _Mapping]] = ..., queue_timeout_s: _Optional[float] = ..., prefill_timeout_s: _Optional[float] = ..., transfer_timeout_s: _Optional[float] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("key", "unix_ns", "queued", "started", "pages_sent", "done")
    KEY_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_SENT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    unix_ns: int
    queued: Queued
    started: Started
    pages_sent: PagesSent
    done: Done
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., unix_ns: _Optional[int] = ..., queued: _Optional[_Union[Queued, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., pages_sent: _Optional[_Union[PagesSent, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("requests_ahead", "tokens_ahead")
    REQUESTS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    requests_ahead: int
    tokens_ahead: int
    def __init__(self, requests_ahead: _Optional[int] = ..., tokens_ahead: _Optional[int] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("queued_ns",)
    QUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    queued_ns: int
    def __init__(self, queued_ns: _Optional[int] = ...) -> None: ...

class RangeDigest(_message.Message):
    __slots__ = ("layer_id", "kind", "first", "count", "digest")
    LAYER_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    layer_id: int
    kind: _common_pb2.RegionKind
    first: int
    count: int
    digest: bytes
    def __init__(self, layer_id: _Optional[int] = ..., kind: _Optional[_Union[_common_pb2.RegionKind, str]] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class PagesSent(_message.Message):
    __slots__ = ("first_page", "page_count", "tokens_computed", "posted_unix_ns", "landed_unix_ns", "bytes", "digests")
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    POSTED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    LANDED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    first_page: int
    page_count: int
    tokens_computed: int
    posted_unix_ns: int
    landed_unix_ns: int
    bytes: int
    digests: _containers.RepeatedCompositeFieldContainer[RangeDigest]
    def __init__(self, first_page: _Optional[int] = ..., page_count: _Optional[int] = ..., tokens_computed: _Optional[int] = ..., posted_unix_ns: _Optional[int] = ..., landed_unix_ns: _Optional[int] = ..., bytes: _Optional[int] = ..., digests: _Optional[_Iterable[_Union[RangeDigest, _Mapping]]] = ...) -> None: ...

class PrefillTimings(_message.Message):
    __slots__ = ("queued_ns", "compute_ns", "exposed_transfer_ns", "bytes_sent", "last_chunk_unix_ns", "chunks", "transfer_ns")
    QUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_NS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    LAST_CHUNK_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_NS_FIELD_NUMBER: _ClassVar[int]
    queued_ns: int
    compute_ns: int
    exposed_transfer_ns: int
    bytes_sent: int
    last_chunk_unix_ns: int
    chunks: int
    transfer_ns: int
    def __init__(self, queued_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., exposed_transfer_ns: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., last_chunk_unix_ns: _Optional[int] = ..., chunks: _Optional[int] = ..., transfer_ns: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("first_token", "logprobs", "digests", "timings", "seed", "prompt_logprobs")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    logprobs: _common_pb2.TokenLogprobs
    digests: _containers.RepeatedCompositeFieldContainer[RangeDigest]
    timings: PrefillTimings
    seed: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, first_token: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ..., digests: _Optional[_Iterable[_Union[RangeDigest, _Mapping]]] = ..., timings: _Optional[_Union[PrefillTimings, _Mapping]] = ..., seed: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("key", "drain_timeout_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    drain_timeout_s: float
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., drain_timeout_s: _Optional[float] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("state", "callee")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[CancelReply.State]
        STATE_DRAINED: _ClassVar[CancelReply.State]
        STATE_UNKNOWN: _ClassVar[CancelReply.State]
        STATE_DRAINED_AFTER_FAILURE: _ClassVar[CancelReply.State]
    STATE_UNSPECIFIED: CancelReply.State
    STATE_DRAINED: CancelReply.State
    STATE_UNKNOWN: CancelReply.State
    STATE_DRAINED_AFTER_FAILURE: CancelReply.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    CALLEE_FIELD_NUMBER: _ClassVar[int]
    state: CancelReply.State
    callee: _common_pb2.Incarnation
    def __init__(self, state: _Optional[_Union[CancelReply.State, str]] = ..., callee: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ...) -> None: ...
