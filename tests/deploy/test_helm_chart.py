"""Test the chart, rendered by Helm's own library: valid objects that fit one another and the product."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from chart_objects import (
    EVERYTHING,
    SEVERAL_NODES,
    Object,
    arguments_of,
    chosen,
    container_of,
    environment_of,
    of_kind,
    ports_of,
    probes_of,
    workloads,
)
from container_files import CHART, ROOT, Image, component_of, settings, strange_variables
from demanded import demand

ELSEWHERE = {"ScaledObject", "PodMonitor", "LeaderWorkerSet"}
"""Kinds of operators, whose schemas Kubernetes does not have."""
OLDEST, NEWEST = "1.27", "1.37"
MISTAKES: list[tuple[Object, str]] = [
    ({"verifer": {}}, "verifer"),
    ({"tls": {"enabled": "yes"}}, "enabled"),
    ({"verifier": {"drainSeconds": 3_600}}, "drainSeconds"),
    ({"verifier": {"engine": "vLLM"}}, "engine"),
    ({"verifier": {"model": {"volume": {"emptyDir": {}, "hostPath": {"path": "/m"}}}}}, "volume"),
]

values = pytest.mark.parametrize(
    "values", [{}, EVERYTHING, SEVERAL_NODES], ids=["defaults", "everything", "several nodes"]
)
WORKER = "verifier-worker"
"""A component that runs Ray alone, and none of Outrider's programs."""


def programs(objects: list[Object]) -> dict[str, Object]:
    """Return the pod templates that run one of Outrider's programs, by component."""
    return {component: template for component, template in workloads(objects).items() if component != WORKER}


@values
def test_helms_linter_finds_nothing(helm: Any, values: Object) -> None:
    report = helm.lint(str(CHART), values, strict=True)
    assert report["errors"] == []
    assert [found["error"] for found in report["messages"]] == ["icon is recommended"]


@values
def test_every_object_is_one_that_kubernetes_knows(chart: Callable[..., list[Object]], values: Object) -> None:
    demand("kubernetes_validate", "the check of objects")
    import kubernetes_validate

    objects = chart(values)
    for found in objects:
        if found["kind"] == "LeaderWorkerSet":  # its pods as those of a StatefulSet
            group = found["spec"]["leaderWorkerTemplate"]
            assert set(group) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
            for template in (group["leaderTemplate"], group["workerTemplate"]):
                pods = {"serviceName": "s", "selector": {"matchLabels": template["metadata"]["labels"]}}
                stateful = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "s"}}
                kubernetes_validate.validate({**stateful, "spec": {**pods, "template": template}}, OLDEST, strict=True)
                kubernetes_validate.validate({**stateful, "spec": {**pods, "template": template}}, NEWEST, strict=True)
        elif found["kind"] not in ELSEWHERE:
            kubernetes_validate.validate(found, OLDEST, strict=True)
            kubernetes_validate.validate(found, NEWEST, strict=True)
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(set(names)) == len(names)
    assert all(found["metadata"]["namespace"] == "llm" for found in objects)


@pytest.mark.parametrize(("wrong", "named"), MISTAKES)
def test_a_wrong_value_is_refused_by_name(helm: Any, wrong: Object, named: str) -> None:
    with helm.Chart.load(str(CHART)) as loaded, pytest.raises(helm.HelmValuesError, match=named):
        loaded.validate_schema(wrong)


PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


@pytest.mark.parametrize("text", re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
def test_the_values_on_the_page_are_taken_and_do_something(chart: Callable[..., list[Object]], text: str) -> None:
    assert chart(yaml.safe_load(text)) != chart({})


@values
def test_the_product_takes_every_containers_command_and_variables(
    chart: Callable[..., list[Object]], values: Object
) -> None:
    for component, template in programs(chart(values)).items():
        image = Image.read(component_of(container_of(template)["image"]))
        environment = {**image.environment, **environment_of(template)}
        assert strange_variables(environment) == []
        config = settings(image.name, arguments_of(template), environment)
        listen = config.serve_listen if component == "edge" else config.listen
        assert int(listen.removeprefix("0.0.0.0:")) == ports_of(template)["http" if component == "edge" else "grpc"]
        if component != "edge":
            assert int(config.metrics.removeprefix("0.0.0.0:")) == ports_of(template)["metrics"]


@values
def test_services_and_policies_meet_pods_and_their_ports(chart: Callable[..., list[Object]], values: Object) -> None:
    objects = chart(values)
    templates = workloads(objects)
    for service in of_kind(objects, "Service"):
        [component] = chosen(service["spec"]["selector"], templates)
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports_of(templates[component]))
    for policy in of_kind(objects, "NetworkPolicy"):
        [component] = chosen(policy["spec"]["podSelector"]["matchLabels"], templates)
        inwards = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())}
        assert inwards == set(ports_of(templates[component]))
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert len(chosen(budget["spec"]["selector"]["matchLabels"], templates)) == 1


@values
def test_verifiers_and_devices_dial_the_coordinators_service(
    chart: Callable[..., list[Object]], values: Object
) -> None:
    objects = chart(values)
    services = {found["metadata"]["name"]: found for found in of_kind(objects, "Service")}
    templates = programs(objects)
    for component in set(templates) - {"coordinator"}:
        [given] = [word for word in arguments_of(templates[component]) if word.startswith("--coordinator=")]
        found = re.fullmatch(r"--coordinator=([a-z-]+)\.llm\.svc:(\d+)", given)
        assert found
        service = services[found[1]]["spec"]
        assert chosen(service["selector"], templates) == ["coordinator"]
        assert int(found[2]) in [port["port"] for port in service["ports"]]


def test_devices_receive_a_verifiers_own_name(chart: Callable[..., list[Object]]) -> None:
    objects = chart({})
    [stateful] = of_kind(objects, "StatefulSet")
    [headless] = [each for each in of_kind(objects, "Service") if each["spec"].get("clusterIP") == "None"]
    assert stateful["spec"]["serviceName"] == headless["metadata"]["name"]
    assert headless["spec"]["publishNotReadyAddresses"] is True
    name = f"pod-0.{headless['metadata']['name']}.llm.svc.cluster.local:7710"
    assert f"--advertise={name}" in arguments_of(stateful["spec"]["template"])


@values
def test_no_pod_may_more_than_it_must(chart: Callable[..., list[Object]], values: Object) -> None:
    for template in workloads(chart(values)).values():
        pod, container = template["spec"], container_of(template)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"requests", "limits"} <= set(container["resources"])


def test_with_tls_nothing_is_plain_and_health_is_asked_where_kubernetes_can(chart: Callable[..., list[Object]]) -> None:
    for component, template in workloads(chart(EVERYTHING)).items():
        assert "--insecure" not in arguments_of(template)
        for probe in probes_of(template).values():
            assert "grpc" not in probe
            assert probe.get("httpGet", {}).get("port", "metrics") in ports_of(template)
        mounts = {mount["mountPath"]: mount["name"] for mount in container_of(template)["volumeMounts"]}
        files = [word.partition("=")[2] for word in arguments_of(template) if re.match(r"--(tls|coordinator-ca)", word)]
        assert files, component
        assert {f"/{path.split('/')[1]}" for path in files} <= set(mounts)
    assert all("--insecure" in arguments_of(template) for template in workloads(chart({})).values())


@values
def test_a_verifier_has_time_to_drain(chart: Callable[..., list[Object]], values: Object) -> None:
    template = workloads(chart(values))["verifier"]
    image = Image.read(component_of(container_of(template)["image"]))
    drain_s = settings(image.name, arguments_of(template), {**image.environment, **environment_of(template)}).drain_s
    [*_, script] = container_of(template)["lifecycle"]["preStop"]["exec"]["command"]
    found = re.fullmatch(r"kill -TERM 1 && timeout (\d+) tail --pid=1 -f /dev/null", script)
    assert found
    assert drain_s < int(found[1]) < template["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    ("verifier", "engine"),
    [
        ({}, "torch"),
        ({"engine": "vllm"}, "vllm"),
        ({"gpus": 1}, "vllm"),
        ({"gpus": 1, "engine": "torch"}, "torch"),
        ({"gpus": 4}, "vllm"),
    ],
)
def test_the_engine_is_the_one_that_is_asked_for_and_with_gpus_vllm(
    chart: Callable[..., list[Object]], verifier: Object, engine: str
) -> None:
    template = workloads(chart({"verifier": verifier}))["verifier"]
    image = Image.read(component_of(container_of(template)["image"]))
    config = settings(image.name, arguments_of(template), {**image.environment, **environment_of(template)})
    gpus = verifier.get("gpus", 0)
    assert (config.engine, config.device) == (engine, "cuda" if gpus else "cpu")
    assert config.engine_args.of_vllm.get("tensor_parallel_size", 1) == max(gpus, 1)
    assert container_of(template)["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
    shared = [volume["emptyDir"]["medium"] for volume in template["spec"]["volumes"] if volume["name"] == "shm"]
    assert shared == (["Memory"] if engine == "vllm" else [])


def test_the_fleet_is_scaled_by_metrics_that_verifiers_export(chart: Callable[..., list[Object]]) -> None:
    objects = chart(EVERYTHING)
    [scaled], [stateful] = of_kind(objects, "ScaledObject"), of_kind(objects, "StatefulSet")
    assert scaled["spec"]["scaleTargetRef"]["name"] == stateful["metadata"]["name"]
    assert "replicas" not in stateful["spec"]
    section = (ROOT / "docs" / "metrics.md").read_text().partition("\n## Verifier\n")[2].partition("\n## ")[0]
    exported = set(re.findall(r"^\| `(outrider_\w+)` \| gauge ", section, re.MULTILINE))
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    used = {name for query in queries for name in re.findall(r"outrider_\w+", query)}
    assert used == {"outrider_min_acceptance", "outrider_sessions", "outrider_session_capacity"}
    assert used <= exported
    pods = {found for query in queries for found in re.findall(r'pod=~"([^"]+)"', query)}
    assert all(re.fullmatch(pattern, f"{stateful['metadata']['name']}-0") for pattern in pods)
    assert all(float(trigger["metadata"]["threshold"]) > 0 for trigger in scaled["spec"]["triggers"])
    assert all(trigger["metadata"]["ignoreNullValues"] == "false" for trigger in scaled["spec"]["triggers"])
