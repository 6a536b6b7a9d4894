"""A certificate authority for tests, made with openssl: it lives as long as its folder."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Signed:
    """One certificate for 127.0.0.1 and localhost."""

    ca: Path
    cert: Path
    key: Path

    def flags(self) -> tuple[str, ...]:
        return ("--tls-ca", str(self.ca), "--tls-cert", str(self.cert), "--tls-key", str(self.key))

    def settings(self) -> dict[str, Path]:
        return {"tls_ca": self.ca, "tls_cert": self.cert, "tls_key": self.key}


class Authority:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.ca, self._key = folder / "ca.pem", folder / "ca.key"
        _openssl("req", "-x509", *_new(self._key), "-out", str(self.ca), "-days", "2", "-subj", f"/CN={folder.name}")

    def sign(self, name: str) -> Signed:
        cert, key, request = (self._folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        extensions = self._folder / "extensions"
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        _openssl("req", *_new(key), "-out", str(request), "-subj", f"/CN={name}")
        _openssl(
            "x509", "-req", "-in", str(request), "-CA", str(self.ca), "-CAkey", str(self._key), "-CAcreateserial",
            "-days", "2", "-extfile", str(extensions), "-out", str(cert),
        )  # fmt: skip
        return Signed(self.ca, cert, key)


def _new(key: Path) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(key))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
