"""The compose files: every combination is accepted, and what they set exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from decode_service.settings import DecodeSettings
from prefill_service.settings import PrefillSettings
from router_service.settings import RouterSettings

ROOT = Path(__file__).resolve().parents[2]
GPU, RDMA = "deploy/compose.gpu.yml", "deploy/compose.rdma.yml"
SERVICES = {"prefill": PrefillSettings, "decode": DecodeSettings, "router": RouterSettings}
# Read by compose itself; no service sees them.
OF_COMPOSE = {"IMAGE", "BASE_IMAGE", "BUILD_NETWORK", "ENV_FILE", "BIND", "PORT", "SET", "MODEL_DIR", "HOST_ADDRESS"}
OF_COMPOSE |= {"RDMA_DEVICES", "REGISTRIES", "REGISTRY_BIND"}
OF_COMPOSE |= {f"{role.upper()}_{what}" for role in SERVICES for what in ("CPUS", "MEMORY")}


def _settings() -> set[str]:
    return {f"{kind.env_prefix()}{name.upper()}" for kind in SERVICES.values() for name in kind.model_fields}


def _parsed(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name",
    ["docker-compose.yml", GPU, RDMA, "deploy/compose.env", "deploy/Dockerfile", "deploy/docker/entrypoint.sh"],
)
def test_every_variable_named_is_a_setting_or_composes_own(name: str):
    named = set(re.findall(r"\bDSV4PD_([A-Z0-9_]*[A-Z0-9])\b", (ROOT / name).read_text(encoding="utf-8")))
    assert {f"DSV4PD_{part}" for part in named - OF_COMPOSE} <= _settings()


@pytest.mark.parametrize("name", ["docker-compose.yml", GPU, RDMA])
def test_a_worker_gets_settings_of_its_own_role_alone(name: str):
    for role, service in _parsed(name)["services"].items():
        for variable in service.get("environment", {}):
            assert role not in SERVICES or variable.startswith(SERVICES[role].env_prefix()), (role, variable)


def test_the_stop_grace_outlasts_the_drain():
    for role, kind in SERVICES.items():
        grace = float(_parsed("docker-compose.yml")["services"][role]["stop_grace_period"].rstrip("s"))
        notice = kind.model_fields["drain_notice_s"].default if role == "router" else 0
        assert grace > kind.model_fields["drain_timeout_s"].default + notice + 5


def test_memlock_is_asked_for_with_rdma_alone():
    """Docker refuses it in many places, so the plain file must not ask."""
    assert "ulimits" not in (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert _parsed(RDMA)["services"]["decode"]["ulimits"]["memlock"] == {"soft": -1, "hard": -1}


def test_prometheus_asks_the_ports_that_the_image_sets():
    image = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    for job in _parsed("deploy/prometheus/prometheus.yml")["scrape_configs"]:
        (target,) = job["dns_sd_configs"]
        variable = "PORT" if job["job_name"] == "router" else "METRICS_PORT"
        assert target["names"] == [job["job_name"]]
        assert f"DSV4PD_{job['job_name'].upper()}_{variable}={target['port']} " in image


@pytest.mark.parametrize("files", [[], [GPU], [RDMA], [GPU, RDMA]], ids=["cpu", "gpu", "rdma", "gpu-rdma"])
@pytest.mark.parametrize("profile", [[], ["--profile", "observability"]], ids=["plain", "observed"])
def test_compose_accepts_the_combination(files: list[str], profile: list[str]):
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed; tests/compose installs it")
    chosen = [word for name in ["docker-compose.yml", *files] for word in ("-f", name)]
    environment = {**os.environ, "DSV4PD_HOST_ADDRESS": "10.0.0.1"}
    done = subprocess.run(
        ["docker-compose", *chosen, *profile, "config"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert {"prefill", "decode", "router"} <= services.keys()
    assert (("prometheus" in services) and ("grafana" in services)) or not profile
    if GPU in files:
        assert services["decode"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    if RDMA in files:
        assert services["decode"]["network_mode"] == "host"
        assert services["decode"]["environment"]["DSV4PD_DECODE_TRANSFER_HOSTNAME"] == "10.0.0.1"


@pytest.mark.parametrize("name", ["cpu", "cuda12", "cuda13", "build"])
def test_every_locked_package_has_a_version_and_a_hash(name: str):
    text = (ROOT / f"deploy/locks/{name}.txt").read_text(encoding="utf-8")
    entries = [entry for entry in re.split(r"\n(?=[A-Za-z])", text) if entry and not entry.startswith("#")]
    assert len(entries) > 5
    for entry in entries:
        assert re.match(r"[A-Za-z0-9_.-]+==\S+", entry), entry
        assert "--hash=sha256:" in entry, entry


@pytest.mark.parametrize("name", ["cpu", "cuda12", "cuda13"])
def test_the_lock_has_every_dependency_of_the_project(name: str):
    """A new dependency needs `python tools/gen_locks.py`, or the image would lack it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {
        re.match(r"[\w.-]+", dependency)[0].lower().replace("_", "-")  # pyright: ignore[reportOptionalSubscript]
        for dependency in [*project["dependencies"], *project["optional-dependencies"][name]]
    }
    text = (ROOT / f"deploy/locks/{name}.txt").read_text(encoding="utf-8").lower()
    assert wanted <= set(re.findall(r"^([a-z0-9_.-]+)==", text, re.MULTILINE))


def test_the_locks_hold_what_the_constraints_say():
    pinned = dict(
        line.lower().split("==") for line in (ROOT / "deploy/constraints.txt").read_text().split() if "==" in line
    )
    for name in ("cpu", "cuda12", "cuda13"):
        text = (ROOT / f"deploy/locks/{name}.txt").read_text(encoding="utf-8").lower()
        locked = dict(re.findall(r"^([a-z0-9_.-]+)==(\S+)", text, re.MULTILINE))
        differing = {
            package: (version, locked[package.replace("_", "-")])
            for package, version in pinned.items()
            if locked.get(package.replace("_", "-"), version) != version
        }
        assert not differing
