"""Test the chart, rendered by Helm's own library: valid objects that fit one another and the product."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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
from container_files import CHART, DOCKER, ROOT, Image, component_of, settings, strange_variables
from demanded import demand

from outrider import __version__

ELSEWHERE = {"ScaledObject", "PodMonitor", "LeaderWorkerSet"}
"""Kinds of operators, whose schemas Kubernetes does not have."""
OLDEST, NEWEST = "1.27", "1.37"
MISTAKES: list[tuple[Object, str]] = [
    ({"verifer": {}}, "verifer"),
    ({"verifier": {"drainSecond": 3}}, "drainSecond"),
    ({"tls": {"enabled": "yes"}}, "enabled"),
    ({"coordinator": {"replicas": 0}}, "replicas"),
    ({"autoscaling": {"min_acceptance": 2}}, "min_acceptance"),
    ({"verifier": {"drainSeconds": 3_600}}, "drainSeconds"),
    ({"verifier": {"engine": "vLLM"}}, "engine"),
    ({"verifier": {"region": "eu west"}}, "region"),
    ({"verifier": {"nodes": 0}}, "nodes"),
    ({"autoscaling": {"kind": "vpa"}}, "kind"),
    ({"coordinator": {"env": {"lower": "x"}}}, "lower"),
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


def test_every_value_has_its_place_in_the_schema() -> None:
    def compare(given: Any, schema: Object, path: str) -> None:
        if not isinstance(given, dict) or "properties" not in schema:
            return
        assert set(given) <= set(schema["properties"]), path
        for name, value in given.items():
            compare(value, schema["properties"][name], f"{path}.{name}")

    compare(
        yaml.safe_load((CHART / "values.yaml").read_text()), json.loads((CHART / "values.schema.json").read_text()), ""
    )


PAGE = (ROOT / "docs" / "deploy.md").read_text()


@pytest.mark.parametrize("text", re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
def test_the_values_on_the_page_are_taken_and_do_something(chart: Callable[..., list[Object]], text: str) -> None:
    assert chart(yaml.safe_load(text)) != chart({})


def test_the_page_names_the_secrets_keys_and_values_that_there_are(chart: Callable[..., list[Object]]) -> None:
    keys = {
        variable["valueFrom"]["secretKeyRef"]["key"]
        for template in workloads(chart(EVERYTHING)).values()
        for variable in container_of(template)["env"]
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    assert [key for key in keys if key not in PAGE] == []
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in re.findall(
        r"`((?:tls(?!\.(?:crt|key))|edge|verifier|coordinator|networkPolicy|podMonitor)\.[\w.]+)", PAGE
    ):
        found: Any = known
        for name in path.split("."):
            assert name in found, path
            found = found[name]


def test_nothing_needs_an_operator_unless_asked_for(chart: Callable[..., list[Object]]) -> None:
    assert of_kind(chart({}), *ELSEWHERE) == []
    every = [*chart(EVERYTHING), *chart(SEVERAL_NODES)]
    assert {found["kind"] for found in of_kind(every, *ELSEWHERE)} == ELSEWHERE


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


def test_devices_outside_reach_each_verifier_by_a_service_of_its_own(chart: Callable[..., list[Object]]) -> None:
    objects = chart(EVERYTHING)
    [stateful] = of_kind(objects, "StatefulSet")
    label = "statefulset.kubernetes.io/pod-name"
    own = [each for each in of_kind(objects, "Service") if label in each["spec"]["selector"]]
    pods = [f"{stateful['metadata']['name']}-{number}" for number in range(EVERYTHING["autoscaling"]["maxReplicas"])]
    assert [each["spec"]["selector"][label] for each in own] == pods
    named = [each["metadata"]["annotations"]["external-dns.alpha.kubernetes.io/hostname"] for each in own]
    assert named == [f"{pod}.llm.example" for pod in pods]
    assert "--advertise=pod-0.llm.example:7710" in arguments_of(stateful["spec"]["template"])


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


@pytest.mark.parametrize("component", ["coordinator", "verifier", "edge"])
def test_a_pod_runs_as_its_images_user(chart: Callable[..., list[Object]], component: str) -> None:
    template = workloads(chart(EVERYTHING))[component]
    context, image = template["spec"]["securityContext"], Image.read(component_of(container_of(template)["image"]))
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == image.one("USER")


@values
def test_services_names_do_not_become_settings(chart: Callable[..., list[Object]], values: Object) -> None:
    """Kubernetes would set OUTRIDER_VERIFIER_PORT for a Service `outrider-verifier`."""
    assert all(template["spec"]["enableServiceLinks"] is False for template in workloads(chart(values)).values())


def test_health_is_asked_over_grpc_at_the_port_that_devices_use(chart: Callable[..., list[Object]]) -> None:
    templates = workloads(chart({}))
    for component in ("coordinator", "verifier"):
        for name, probe in probes_of(templates[component]).items():
            if (component, name) != ("coordinator", "livenessProbe"):
                assert probe["grpc"] == {"port": ports_of(templates[component])["grpc"]}
    assert set(probes_of(templates["verifier"])) == {"startupProbe", "readinessProbe", "livenessProbe"}


def test_a_coordinator_is_not_restarted_since_redis_is_away(chart: Callable[..., list[Object]]) -> None:
    assert probes_of(workloads(chart({}))["coordinator"])["livenessProbe"]["tcpSocket"] == {"port": "grpc"}


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
def test_what_is_mounted_is_there_and_what_must_be_written_can_be(
    chart: Callable[..., list[Object]], values: Object
) -> None:
    for component, template in workloads(chart(values)).items():
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = container_of(template)["volumeMounts"]
        assert {mount["name"] for mount in mounts} == set(volumes)
        written = {mount["mountPath"] for mount in mounts if "emptyDir" in volumes[mount["name"]]}
        image = component_of(container_of(template)["image"])
        further = {"verifier": set(), "verifier-vllm": {"/dev/shm"}}.get(image, {"/var/lib/outrider"})
        assert written == {"/tmp", *further}, component


@values
def test_a_verifier_has_time_to_drain(chart: Callable[..., list[Object]], values: Object) -> None:
    template = workloads(chart(values))["verifier"]
    image = Image.read(component_of(container_of(template)["image"]))
    drain_s = settings(image.name, arguments_of(template), {**image.environment, **environment_of(template)}).drain_s
    [*_, script] = container_of(template)["lifecycle"]["preStop"]["exec"]["command"]
    found = re.fullmatch(r"kill -TERM 1 && timeout (\d+) tail --pid=1 -f /dev/null", script)
    assert found
    assert drain_s < int(found[1]) < template["spec"]["terminationGracePeriodSeconds"]


def test_a_gpu_is_asked_for_and_used_by_an_image_of_its_own(chart: Callable[..., list[Object]]) -> None:
    everything = workloads(chart(EVERYTHING))
    gpu, cpu = everything["verifier"], workloads(chart({}))["verifier"]
    assert container_of(gpu)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "--device=cuda" in arguments_of(gpu)
    assert "nvidia.com/gpu" not in container_of(cpu)["resources"]["limits"]
    assert "--device=cuda" not in arguments_of(cpu)
    tags = {name: container_of(template)["image"].rpartition(":")[2] for name, template in everything.items()}
    assert tags == {"coordinator": "1.2.3", "verifier": "1.2.3-cuda", "edge": "1.2.3"}


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
    assert config.tensor_parallel == max(gpus, 1)
    assert container_of(template)["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
    shared = [volume["emptyDir"]["medium"] for volume in template["spec"]["volumes"] if volume["name"] == "shm"]
    assert shared == (["Memory"] if engine == "vllm" else [])


def test_our_own_engine_on_several_gpus_is_refused_since_its_image_cannot(chart: Callable[..., list[Object]]) -> None:
    with pytest.raises(Exception, match=r"verifier\.gpus is 2, and engine torch takes one GPU"):
        chart({"verifier": {"gpus": 2, "engine": "torch"}})


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


def test_kubernetes_own_autoscaler_gets_the_same_metrics_and_thresholds_from_an_adapter(
    chart: Callable[..., list[Object]],
) -> None:
    given = {"enabled": True, "minReplicas": 3, "maxReplicas": 9, "minAcceptance": 0.35, "occupancy": 0.875}
    by_keda, by_hpa = (chart({"autoscaling": {**given, "kind": kind}}) for kind in ("keda", "hpa"))
    [scaled], [scaler] = of_kind(by_keda, "ScaledObject"), of_kind(by_hpa, "HorizontalPodAutoscaler")
    assert not of_kind(by_hpa, "ScaledObject") and not of_kind(by_keda, "HorizontalPodAutoscaler")
    spec = scaler["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 9)
    assert spec["scaleTargetRef"] == scaled["spec"]["scaleTargetRef"]
    assert spec["behavior"] == scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    targets = {one["pods"]["metric"]["name"]: one["pods"]["target"]["averageValue"] for one in spec["metrics"]}
    assert targets == {"outrider_min_acceptance": "350m", "outrider_occupancy": "875m"}
    rules = yaml.safe_load((DOCKER / "prometheus" / "adapter.yml").read_text())["rules"]["custom"]
    named = {rule.get("name", {}).get("as") or rule["seriesQuery"].partition("{")[0]: rule for rule in rules}
    assert set(named) == set(targets)
    page = (ROOT / "docs" / "metrics.md").read_text()
    for rule in rules:
        used = set(re.findall(r"outrider_\w+", f"{rule['seriesQuery']} {rule['metricsQuery']}"))
        assert all(f"| `{metric}` | gauge |" in page for metric in used)
        assert rule["resources"]["overrides"] == {name: {"resource": name} for name in ("namespace", "pod")}


def test_a_verifier_of_several_nodes_is_a_group_of_a_leader_and_workers(chart: Callable[..., list[Object]]) -> None:
    objects = chart(SEVERAL_NODES)
    assert not of_kind(objects, "StatefulSet")
    [group], [scaler] = of_kind(objects, "LeaderWorkerSet"), of_kind(objects, "HorizontalPodAutoscaler")
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": group["apiVersion"],
        "kind": group["kind"],
        "name": group["metadata"]["name"],
    }
    templates = workloads(objects)
    leader, worker = templates["verifier"], templates[WORKER]
    image = Image.read(component_of(container_of(leader)["image"]))
    config = settings(image.name, arguments_of(leader), {**image.environment, **environment_of(leader)})
    engine = json.loads(config.engine_args)
    assert (config.engine, config.tensor_parallel) == ("vllm", 8)
    assert engine == {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2}
    for template in (leader, worker):
        assert container_of(template)["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert container_of(template)["image"] == "outrider-verifier-vllm:1.2.3-ray"
    # Devices reach leaders alone, by the name that the leader gives out.
    [headless] = [each for each in of_kind(objects, "Service") if each["spec"].get("clusterIP") == "None"]
    assert headless["metadata"]["name"] == group["metadata"]["name"]
    assert chosen(headless["spec"]["selector"], templates) == ["verifier"]
    # A worker outlives its leader's drain.
    waits = int(container_of(worker)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert config.drain_s < waits < worker["spec"]["terminationGracePeriodSeconds"]


def test_the_commands_that_start_ray_do_what_they_shall(chart: Callable[..., list[Object]], tmp_path: Path) -> None:
    """Run them by a shell, with a stand-in for Ray and for the verifier."""
    templates = workloads(chart(SEVERAL_NODES))
    (tmp_path / "bin").mkdir()
    for name, say in {
        "ray": 'echo "ray $PYTHONPATH $*"; ls "$PYTHONPATH"',
        "outrider-verifier": 'echo "verifier $1"',
    }.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{say}\n")
        program.chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "LWS_LEADER_ADDRESS": "leader.example",
    }

    def run(template: Object, *arguments: str) -> list[str]:
        shell, flag, script, *name = container_of(template)["command"]
        script = script.replace("/opt/vllm/bin/ray", "ray").replace("/tmp/packages", str(tmp_path / "packages"))
        done = subprocess.run(
            [shell, flag, script, *name, *arguments], env=environment, capture_output=True, text=True, check=True
        )
        return [line for line in done.stdout.splitlines() if line != os.getcwd()]

    packages = [f"ray {tmp_path / 'packages'}", "cloud_verifier", "outrider"]
    head = run(templates["verifier"], "--model=/models/target")
    assert head == [f"{packages[0]} start --head --port=6379", *packages[1:], "verifier --model=/models/target"]
    joined = run(templates[WORKER])
    assert joined == [f"{packages[0]} start --address=leader.example:6379 --block", *packages[1:]]


def test_ray_is_reached_by_a_verifiers_own_pods_alone(chart: Callable[..., list[Object]]) -> None:
    objects = chart(SEVERAL_NODES)
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "NetworkPolicy")}
    [inwards] = policies["prod-outrider-verifier-worker"]["ingress"]
    [peer] = inwards["from"]
    [expression] = peer["podSelector"]["matchExpressions"]
    assert expression["values"] == ["verifier", WORKER]
    assert peer["podSelector"]["matchLabels"].items() <= workloads(objects)[WORKER]["metadata"]["labels"].items()
    assert inwards in policies["prod-outrider-verifier"]["ingress"]
    assert {"to": [peer]} in policies["prod-outrider-verifier"]["egress"]
    everybody = [rule for rule in policies["prod-outrider-verifier"]["ingress"] if "from" not in rule]
    assert everybody == [{"ports": [{"port": "grpc"}]}]


@pytest.mark.parametrize(
    "verifier", [{"gpus": 0, "imageTag": "x"}, {"gpus": 8}, {"gpus": 1, "engine": "torch", "imageTag": "x"}]
)
def test_several_nodes_need_what_vllm_needs_for_them(chart: Callable[..., list[Object]], verifier: Object) -> None:
    with pytest.raises(Exception, match=r"verifier\.nodes is 2: several nodes need engine vllm"):
        chart({"verifier": {"nodes": 2, **verifier}})


def test_a_verifier_names_its_region(chart: Callable[..., list[Object]]) -> None:
    assert "--region=eu-west" in arguments_of(workloads(chart(EVERYTHING))["verifier"])
    assert not [word for word in arguments_of(workloads(chart({}))["verifier"]) if "region" in word]


def test_jobs_are_called_what_the_alerts_call_them(chart: Callable[..., list[Object]]) -> None:
    objects = chart(EVERYTHING)
    templates = workloads(objects)
    jobs = {}
    for monitor in of_kind(objects, "PodMonitor"):
        [component] = chosen(monitor["spec"]["selector"]["matchLabels"], templates)
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in ports_of(templates[component])
        [rule] = endpoint["relabelings"]
        jobs[rule["replacement"]] = endpoint["port"]
    assert jobs == {"outrider-coordinator": "metrics", "outrider-verifier": "metrics", "outrider-edge": "http"}
    assert set(re.findall(r'job="([^"]+)"', (DOCKER / "prometheus" / "alerts.yml").read_text())) <= set(jobs)
    assert set(jobs) <= set(re.findall(r"job_name: (\S+)", (ROOT / "docs" / "metrics.md").read_text()))


def test_nobody_is_scraped_who_is_not_there(chart: Callable[..., list[Object]]) -> None:
    monitors = of_kind(chart({"podMonitor": {"enabled": True}}), "PodMonitor")
    assert len(monitors) == 2


def test_chart_and_images_are_of_this_version(chart: Callable[..., list[Object]]) -> None:
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert described["appVersion"] == __version__
    images = {container_of(template)["image"] for template in workloads(chart({})).values()}
    assert images == {f"outrider-coordinator:{__version__}", f"outrider-verifier:{__version__}"}
    elsewhere = {container_of(template)["image"] for template in workloads(chart(EVERYTHING)).values()}
    assert "registry.example/llm/outrider-edge:1.2.3" in elsewhere
    assert "registry.example/llm/outrider-verifier-vllm:1.2.3-cuda" in elsewhere


def test_the_notes_warn_of_plain_text(helm: Any) -> None:
    with helm.Chart.load(str(CHART)) as loaded:
        plain = loaded.render({}, name="prod", namespace="llm")["outrider/templates/NOTES.txt"]
        safe = loaded.render(EVERYTHING, name="prod", namespace="llm")["outrider/templates/NOTES.txt"]
    assert "plain text" in plain
    assert "plain text" not in safe
    assert "--ca /tls/ca.crt" in safe
