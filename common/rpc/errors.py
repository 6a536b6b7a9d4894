"""ServiceError to gRPC status and back: the reason and the values travel as google.rpc.Status details."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, status_pb2
from grpc_status import rpc_status

from common.errors import ErrorReason, ServiceError
from common.rpc.gen.dsv4pd.v1 import common_pb2

_CODES: dict[ErrorReason, int] = {
    ErrorReason.INVALID_REQUEST: code_pb2.INVALID_ARGUMENT,
    ErrorReason.CONTEXT_TOO_LONG: code_pb2.INVALID_ARGUMENT,
    ErrorReason.QUEUE_FULL: code_pb2.RESOURCE_EXHAUSTED,
    ErrorReason.POOL_EXHAUSTED: code_pb2.RESOURCE_EXHAUSTED,
    ErrorReason.LAYOUT_MISMATCH: code_pb2.FAILED_PRECONDITION,
    ErrorReason.PREFILL_UNAVAILABLE: code_pb2.UNAVAILABLE,
    ErrorReason.PREFILL_FAILED: code_pb2.INTERNAL,
    ErrorReason.TRANSFER_FAILED: code_pb2.INTERNAL,
    ErrorReason.DIGEST_MISMATCH: code_pb2.DATA_LOSS,
    ErrorReason.DEADLINE_EXCEEDED: code_pb2.DEADLINE_EXCEEDED,
    ErrorReason.CANCELLED: code_pb2.CANCELLED,
    ErrorReason.DUPLICATE_REQUEST: code_pb2.ALREADY_EXISTS,
    ErrorReason.STALE_GENERATION: code_pb2.FAILED_PRECONDITION,
    ErrorReason.DRAINING: code_pb2.UNAVAILABLE,
    ErrorReason.NOT_FOUND: code_pb2.NOT_FOUND,
    ErrorReason.INTERNAL: code_pb2.INTERNAL,
    ErrorReason.DECODE_UNAVAILABLE: code_pb2.UNAVAILABLE,
}

_KNOWN = frozenset(reason.value for reason in ErrorReason)


def to_status(error: ServiceError) -> grpc.Status:
    """The status with an ErrorDetail among its details."""
    detail = common_pb2.ErrorDetail(
        reason=common_pb2.ErrorReason.Name(error.reason.value),
        message=error.message,
        field=error.field,
        ours=error.ours,
        theirs=error.theirs,
        retry_after_s=error.retry_after_s,
        not_begun=error.not_begun,
    )
    packed = any_pb2.Any()
    packed.Pack(detail)
    status = status_pb2.Status(code=_CODES[error.reason], message=error.message, details=[packed])
    return rpc_status.to_status(status)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    """Ends the call with the error. Never returns."""
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.aio.AioRpcError, unavailable: ErrorReason) -> ServiceError:
    """The peer's ServiceError, or one made of a bare status; a peer that can't be reached is `unavailable`."""
    metadata = error.trailing_metadata()
    for key, value in metadata or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode("latin1"))
            for packed in status.details:
                detail = common_pb2.ErrorDetail()
                if packed.Unpack(detail):
                    known = detail.reason in _KNOWN
                    newer = f" (reason {detail.reason}, which this build does not know)"
                    return ServiceError(
                        ErrorReason(detail.reason) if known else _reason_of(error.code(), unavailable),
                        detail.message if known or not detail.reason else detail.message + newer,
                        field=detail.field,
                        ours=detail.ours,
                        theirs=detail.theirs,
                        retry_after_s=detail.retry_after_s,
                        not_begun=detail.not_begun,
                    )
    return ServiceError(_reason_of(error.code(), unavailable), f"{error.code().name}: {error.details()}")


def _reason_of(code: grpc.StatusCode, unavailable: ErrorReason) -> ErrorReason:
    """Of a bare status code."""
    reasons = {
        grpc.StatusCode.UNAVAILABLE: unavailable,
        grpc.StatusCode.CANCELLED: ErrorReason.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED: ErrorReason.DEADLINE_EXCEEDED,
        grpc.StatusCode.INVALID_ARGUMENT: ErrorReason.INVALID_REQUEST,
        grpc.StatusCode.NOT_FOUND: ErrorReason.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorReason.QUEUE_FULL,
    }
    return reasons.get(code, ErrorReason.INTERNAL)
