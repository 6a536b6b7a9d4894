"""What every service's settings have in common: flags, environment and a file, in that order of
precedence, read by pydantic-settings. `DSV4PD_PREFILL_PORT=7001`, `--port 7001` and `port = 7001` in the
TOML file named by `DSV4PD_PREFILL_CONFIG` (or `--config`) mean the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

LogLevel = Literal["debug", "info", "warning", "error"]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


class ServiceSettings(BaseSettings):
    """Base of the services' settings. Subclasses set `service` and their own fields."""

    service: ClassVar[str] = "service"

    log_level: LogLevel = Field(default="info", description="least severe level that is logged")
    host: str = Field(default="127.0.0.1", description="address to listen on")

    otlp_endpoint: str = Field(default="", description="base URL of an OTLP/HTTP collector; empty: no traces")
    tls_ca: Path | None = Field(default=None, description="gRPC: certificate of the authority that signs all, PEM")
    tls_cert: Path | None = Field(default=None, description="gRPC: this process's certificate, both ways, PEM")
    tls_key: Path | None = Field(default=None, description="gRPC: its key, PEM; all three make gRPC mutual TLS")

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    @classmethod
    def env_prefix(cls) -> str:
        return f"DSV4PD_{cls.service.upper()}_"

    @classmethod
    def load(cls, arguments: Sequence[str] | None = None) -> Self:
        """Reads flags (`arguments`, default sys.argv), environment and file.

        Raises SystemExit(2) with one line a problem, each naming the setting and the value.
        """
        flags = list(sys.argv[1:] if arguments is None else arguments)
        config = _config_file(flags, cls.env_prefix())

        class Loaded(cls):  # type: ignore[misc,valid-type]
            model_config = SettingsConfigDict(
                extra="forbid",
                frozen=True,
                env_prefix=cls.env_prefix(),
                toml_file=config,
                cli_prog_name=f"dsv4-pd {cls.service}",
                cli_kebab_case=True,
                cli_implicit_flags=True,
                cli_hide_none_type=True,
            )

            @classmethod
            def settings_customise_sources(
                cls,
                settings_cls: type[BaseSettings],
                init_settings: PydanticBaseSettingsSource,
                env_settings: PydanticBaseSettingsSource,
                dotenv_settings: PydanticBaseSettingsSource,
                file_secret_settings: PydanticBaseSettingsSource,
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                command_line = CliSettingsSource[BaseSettings](settings_cls, cli_parse_args=flags)
                return command_line, env_settings, TomlConfigSettingsSource(settings_cls)

        try:
            loaded = Loaded()
        except ValidationError as error:
            for problem in error.errors():
                name = ".".join(str(part) for part in problem["loc"])
                value = problem.get("input")
                print(f"{cls.service}: setting {name}: {problem['msg']} (got {value!r})", file=sys.stderr)
            raise SystemExit(2) from None
        return cls.model_construct(**loaded.model_dump())


class WorkerSettings(ServiceSettings):
    """What the prefill and the decode service's settings have in common besides."""

    register_with: str = Field("", description="registries of routers, host:port, comma separated, to register with")
    device: str = Field("cpu", description="where to compute: cpu, cuda or cuda:N")
    admin_token_sha256: str = Field("", description="SHA-256 of the token of admin calls (dsv4-pd keys admin-token)")
    admin_names: str = Field("", description="certificate names (CN, SAN) that may make admin calls, comma separated")
    advertise_address: str = Field("", description="host:port where routers reach this worker; empty: where it listens")


def _config_file(flags: list[str], prefix: str) -> Path | None:
    """Takes `--config FILE` out of `flags`, or reads the environment; a missing file is an error."""
    name = os.environ.get(f"{prefix}CONFIG")
    for index, flag in enumerate(flags):
        if flag == "--config" and index + 1 < len(flags):
            name = flags[index + 1]
            del flags[index : index + 2]
            break
        if flag.startswith("--config="):
            name = flag.partition("=")[2]
            del flags[index]
            break
    if name is None:
        return None
    path = Path(name)
    if not path.is_file():
        print(f"settings file {path} does not exist", file=sys.stderr)
        raise SystemExit(2)
    return path
