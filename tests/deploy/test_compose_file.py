"""Test that docker/compose.yaml is valid, and that the product takes its commands and variables."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from container_files import DOCKER, ROOT, Image, component_of, compose, secrets, settings, strange_variables

SERVICES: dict[str, Any] = compose(secrets())["services"]
OURS = {name: service for name, service in SERVICES.items() if name != "redis"}

each = pytest.mark.parametrize("name", SERVICES)
each_of_ours = pytest.mark.parametrize("name", OURS)


def own_settings(name: str) -> Any:
    service, image = SERVICES[name], Image.read(component_of(SERVICES[name]["image"]))
    return settings(image.name, service["command"], {**image.environment, **service["environment"]})


def test_it_keeps_to_the_compose_specification(tool: Callable[..., str]) -> None:
    said = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DOCKER / "compose.yaml"))
    assert said == "ok -- validation done\n"


def test_redis_a_coordinator_two_verifiers_and_a_device_are_there() -> None:
    components = sorted(component_of(service["image"]) for service in OURS.values())
    assert components == ["coordinator", "edge", "verifier", "verifier"]
    assert SERVICES["redis"]["image"].startswith("redis:")


@pytest.mark.parametrize("secret", secrets())
def test_a_secret_that_is_not_set_stops_everything(secret: str) -> None:
    with pytest.raises(KeyError, match=secret):
        compose({**secrets(), secret: ""})


def test_the_example_names_every_variable_but_the_version() -> None:
    used = set(re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text()))
    named = set(re.findall(r"^#?(\w+)=", (DOCKER / ".env.example").read_text(), re.MULTILINE))
    assert used - named == {"OUTRIDER_VERSION"}
    assert named <= used


def test_the_page_reads_the_secrets_before_it_uses_them() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    before, _, after = page.partition("## Compose")[2].partition("\n## ")[0].partition("set -a; . docker/.env; set +a")
    assert "$" not in before
    assert set(re.findall(r"\$(\w+)", after)) == {"SERVE_KEY"} <= secrets().keys()


@each_of_ours
def test_the_product_takes_the_command_and_the_variables(name: str) -> None:
    assert strange_variables(SERVICES[name]["environment"]) == []
    config = own_settings(name)
    if name != "coordinator":
        assert config.coordinator == "coordinator:7700"


def test_the_verifiers_have_ids_and_addresses_of_their_own() -> None:
    configs = {name: own_settings(name) for name in OURS if name.startswith("verifier")}
    assert {name: config.verifier_id for name, config in configs.items()} == {name: name for name in configs}
    assert all(config.advertise == f"{name}:7710" for name, config in configs.items())


def test_secrets_are_the_same_on_both_sides() -> None:
    coordinator, edge = own_settings("coordinator"), own_settings("edge")
    assert own_settings("verifier-1").join_token == coordinator.join_token
    assert edge.api_key == coordinator.tenant_keys["device"]
    assert f":{secrets()['REDIS_PASSWORD']}@redis:6379" in coordinator.redis
    assert SERVICES["redis"]["environment"]["REDIS_PASSWORD"] == secrets()["REDIS_PASSWORD"]


@each
def test_a_container_cannot_do_more_than_it_must(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}


def test_nothing_is_published_but_the_devices_server_on_this_machine() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"edge": ["127.0.0.1:8080:8080"]}


@each
def test_what_a_service_waits_for_can_become_healthy(name: str) -> None:
    for other, how in SERVICES[name].get("depends_on", {}).items():
        assert how == {"condition": "service_healthy"}
        assert "healthcheck" in SERVICES[other] or Image.read(component_of(SERVICES[other]["image"])).healthcheck


def test_a_verifier_is_given_longer_than_it_drains() -> None:
    for name in ("verifier-1", "verifier-2"):
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > own_settings(name).drain_s


def test_what_is_kept_is_on_volumes_that_are_there() -> None:
    named = [mount.partition(":")[0] for service in SERVICES.values() for mount in service.get("volumes", ())]
    assert {name for name in named if "/" not in name} == set(compose(secrets())["volumes"])
