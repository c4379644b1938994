"""Resolve references between the objects of a rendered chart, and provide values that switch everything on."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

EVERYTHING: Object = {
    "image": {"prefix": "registry.example/llm/", "tag": "1.2.3", "pullSecrets": [{"name": "pull"}]},
    "tls": {"enabled": True},
    "coordinator": {
        "replicas": 3,
        "artifacts": {"existingClaim": "drafts", "url": "https://drafts.example/"},
        "env": {"OUTRIDER_COORDINATOR_WINDOW_CONTROL": False},
        "extraArgs": ["--report-interval-ms=2000"],
        "service": {"type": "LoadBalancer", "annotations": {"example.com/a": "b"}},
    },
    "verifier": {
        "gpus": 1,
        "imageTag": "1.2.3-cuda",
        "drainSeconds": 300,
        "extraArgs": ["--max-sessions=16"],
        "env": {"OUTRIDER_VERIFIER_KV_SLOTS": 1024},
        "external": {"domain": "llm.example", "annotations": {"example.com/c": "d"}},
        "runtimeClassName": "nvidia",
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
    "edge": {"enabled": True, "env": {"OUTRIDER_EDGE_DRAFT_CPUS": 2}},
    "autoscaling": {"enabled": True, "minReplicas": 2, "maxReplicas": 5},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"verifierEgress": [{"ports": [{"port": 443}]}]},
}
SEVERAL_NODES: Object = {
    "verifier": {"gpus": 8, "nodes": 2, "imageTag": "1.2.3-ray", "drainSeconds": 120},
    "autoscaling": {"enabled": True, "kind": "hpa"},
}
"""Values of verifiers that several machines compute together."""


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def workloads(objects: list[Object]) -> dict[str, Object]:
    """Return the pod templates by component."""
    found = [each["spec"]["template"] for each in of_kind(objects, "Deployment", "StatefulSet")]
    for group in of_kind(objects, "LeaderWorkerSet"):
        found += [group["spec"]["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
    return {template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in found}


def container_of(template: Object) -> Object:
    [container] = template["spec"]["containers"]
    found: Object = container
    return found


def ports_of(template: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(template).get("ports", ())}


def probes_of(template: Object) -> dict[str, Object]:
    return {name: probe for name, probe in container_of(template).items() if name.endswith("Probe")}


def arguments_of(template: Object) -> list[str]:
    """Return the arguments as the container gets them in pod `pod-0`."""
    return [argument.replace("$(POD_NAME)", "pod-0") for argument in container_of(template)["args"]]


def environment_of(template: Object) -> dict[str, str]:
    """Return the variables, with a placeholder for values that come from elsewhere."""
    found: dict[str, str] = {}
    for variable in container_of(template).get("env", ()):
        source = variable.get("valueFrom", {}).get("secretKeyRef", {})
        placeholder = '{"device": "0123456789abcdef"}' if source.get("key") == "tenant-keys" else "redis://redis:6379/0"
        found[variable["name"]] = variable.get("value", placeholder if source else "pod-0")
    return found


def chosen(selector: dict[str, str], templates: dict[str, Object]) -> list[str]:
    """Return the components whose pods the selector takes."""
    wanted = {name: value for name, value in selector.items() if not name.startswith("statefulset.kubernetes.io/")}
    return [
        component
        for component, template in templates.items()
        if wanted.items() <= template["metadata"]["labels"].items()
    ]
