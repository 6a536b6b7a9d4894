"""The Kubernetes manifests: they render, they fit the API's schemas, and what they set exists."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from common.config import ServiceSettings
from decode_service.settings import DecodeSettings
from prefill_service.settings import PrefillSettings
from router_service.settings import RouterSettings

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "k8s"
SERVICES: tuple[type[ServiceSettings], ...] = (PrefillSettings, DecodeSettings, RouterSettings)
VERSION = "1.32"


def render(folder: str) -> list[dict[str, Any]]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl (1.27 or newer, for its kustomize) is not installed: the manifests are not rendered")
    done = subprocess.run([kubectl, "kustomize", str(FOLDER / folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module", params=["base", "overlays/gpu", "overlays/rdma"])
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return render(request.param)


def of(manifests: list[dict[str, Any]], kind: str, name: str = "") -> list[dict[str, Any]]:
    return [m for m in manifests if m["kind"] == kind and name in ("", m["metadata"]["name"])]


def pods(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        m["metadata"]["name"]: m["spec"]["template"] for m in manifests if m["kind"] in ("StatefulSet", "Deployment")
    }


def environment(manifests: list[dict[str, Any]], name: str) -> dict[str, str]:
    (container,) = pods(manifests)[name]["spec"]["containers"]
    (source,) = container["envFrom"]
    (values,) = of(manifests, "ConfigMap", source["configMapRef"]["name"])
    return values["data"] | {e["name"]: e.get("value", "") for e in container.get("env", [])}


def test_every_manifest_fits_the_schema_of_its_kind(manifests: list[dict[str, Any]]):
    assert len(manifests) > 15
    for manifest in manifests:
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_a_misspelt_field_is_noticed(manifests: list[dict[str, Any]]):
    (router,) = of(manifests, "Deployment")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(router | {"spec": router["spec"] | {"replica": 2}}, VERSION, strict=True)


def test_every_variable_is_a_setting(manifests: list[dict[str, Any]]):
    known = {f"{s.env_prefix()}{field.upper()}" for s in SERVICES for field in s.model_fields}
    for name in ("prefill", "decode", "router"):
        mine = {variable for variable in environment(manifests, name) if variable.startswith("DSV4PD_")}
        assert mine
        assert mine <= known


def test_the_grace_is_longer_than_notice_and_drain(manifests: list[dict[str, Any]]):
    for name, template in pods(manifests).items():
        values = environment(manifests, name)
        prefix = f"DSV4PD_{name.upper()}_"
        spent = float(values[f"{prefix}DRAIN_TIMEOUT_S"]) + float(values.get(f"{prefix}DRAIN_NOTICE_S", 0))
        (container,) = template["spec"]["containers"]
        spent += float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert template["spec"]["terminationGracePeriodSeconds"] > spent


def test_mooncakes_ports_are_open_between_workers_alone(manifests: list[dict[str, Any]]):
    values = [environment(manifests, name) for name in ("prefill", "decode")]
    low, high = (
        {int(v[f"DSV4PD_{n}_TRANSFER_{end}_PORT"]) for n, v in zip(("PREFILL", "DECODE"), values, strict=True)}
        for end in ("MIN", "MAX")
    )
    assert len(low) == len(high) == 1
    opened = [
        (policy, rule)
        for policy in of(manifests, "NetworkPolicy")
        for rule in policy["spec"].get("ingress", [])
        if any(p.get("endPort", p["port"]) >= min(low) and p["port"] <= max(high) for p in rule.get("ports", []))
    ]
    ((policy, rule),) = opened
    assert policy["metadata"]["name"] == "workers-transfer"
    assert {(p["port"], p["endPort"]) for p in rule["ports"]} == {(min(low), max(high))}
    (source,) = rule["from"]
    assert source["podSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode"]
    # Without a rule of their own pods take nothing in.
    (closed,) = of(manifests, "NetworkPolicy", "deny-all")
    assert closed["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}


def test_pods_run_without_root_and_without_a_writable_root(manifests: list[dict[str, Any]]):
    for template in pods(manifests).values():
        (container,) = template["spec"]["containers"]
        assert template["spec"]["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_every_workload_may_lose_one_pod_at_a_time(manifests: list[dict[str, Any]]):
    budgets = {b["metadata"]["name"]: b["spec"]["maxUnavailable"] for b in of(manifests, "PodDisruptionBudget")}
    assert budgets == dict.fromkeys(pods(manifests), 1)


def test_gpu_and_rdma_overlays_ask_for_their_devices():
    for folder, wanted in (
        ("overlays/gpu", {"nvidia.com/gpu"}),
        ("overlays/rdma", {"nvidia.com/gpu", "rdma/hca_shared_devices"}),
    ):
        rendered = render(folder)
        for name in ("prefill", "decode"):
            (container,) = pods(rendered)[name]["spec"]["containers"]
            assert wanted <= set(container["resources"]["limits"])
            assert environment(rendered, name)[f"DSV4PD_{name.upper()}_DEVICE"] == "cuda"
        (router,) = pods(rendered)["router"]["spec"]["containers"]
        assert not wanted & set(router["resources"]["limits"])
