"""Lets only administrators use the Admin service, whoever else may call the worker.

An administrator shows a token whose SHA-256 is in the settings, or a client certificate with one of the names in the
settings. GetStatus is open to every peer: routers choose workers by it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog

Context = grpc.aio.ServicerContext[Any, Any]
_SERVICE = "/dsv4pd.v1.Admin/"
_OPEN = (f"{_SERVICE}GetStatus",)
_NAMES = ("x509_common_name", "x509_subject_alternative_name")


@dataclass(frozen=True)
class AdminRole:
    """Who is an administrator. With neither a token nor names nobody is where `required`, else everybody."""

    token_sha256: str = ""
    certificate_names: frozenset[str] = frozenset()
    required: bool = False

    @classmethod
    def of(cls, token_sha256: str, names: str, *, tls: bool) -> AdminRole:
        """`names` are comma separated. Raises ValueError for a digest that is none."""
        digest = token_sha256.strip().lower()
        if digest and (len(digest) != 64 or set(digest) - set("0123456789abcdef")):
            raise ValueError("admin_token_sha256 is not the 64 hex digits of a SHA-256")
        found = frozenset(name.strip() for name in names.split(",") if name.strip())
        if found and not tls:
            raise ValueError("admin_names needs tls_ca, tls_cert and tls_key: without them callers show no certificate")
        return cls(digest, found, required=tls or bool(digest))

    def allows(self, token: str, names: frozenset[str]) -> bool:
        if not self.required:
            return True
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
        has_token = bool(self.token_sha256) and hmac.compare_digest(digest, self.token_sha256)
        return has_token or bool(names & self.certificate_names)


class AdminGuard(grpc.aio.ServerInterceptor):
    def __init__(self, role: AdminRole) -> None:
        self._role = role

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith(_SERVICE) or method in _OPEN:
            return handler
        call = handler.unary_unary

        async def guarded(request: Any, context: Context) -> Any:
            log = structlog.get_logger().bind(method=method.removeprefix(_SERVICE), peer=context.peer())
            if not self._role.allows(_token(context), _certificate_names(context)):
                log.warning("admin call refused")
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this call needs the admin role")
            log.info("admin call")
            return await call(request, context)

        return grpc.unary_unary_rpc_method_handler(
            guarded,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _token(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str) and value.startswith("Bearer "):
            return value.removeprefix("Bearer ")
    return ""


def _certificate_names(context: Context) -> frozenset[str]:
    shown: Any = context.auth_context()
    return frozenset(value.decode("utf-8", "replace") for key in _NAMES for value in shown.get(key, ()))
