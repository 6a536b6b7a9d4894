"""Certificates for gRPC: both ends show one that the same authority signed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import grpc


@dataclass(frozen=True)
class Tls:
    """PEM texts of the authority that peers must be signed by, and of this process's own certificate and key."""

    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)

    @classmethod
    def load(cls, ca: Path | None, cert: Path | None, key: Path | None) -> Tls | None:
        """None when no file is named. Raises ValueError when only some are, OSError when one can't be read."""
        paths = {"tls_ca": ca, "tls_cert": cert, "tls_key": key}
        missing = [name for name, path in paths.items() if path is None]
        if len(missing) == len(paths):
            return None
        if ca is None or cert is None or key is None:
            raise ValueError(f"tls_ca, tls_cert and tls_key belong together, but there is no {', '.join(missing)}")
        return cls(ca.read_bytes(), cert.read_bytes(), key.read_bytes())

    def client(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def server(self) -> grpc.ServerCredentials:
        """Refuses callers without a certificate."""
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)
