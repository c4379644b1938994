"""Test that docker/compose.yaml is valid, and that the product takes its commands and variables."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from container_files import DOCKER, ROOT, Image, component_of, compose, secrets, settings, strange_variables

SERVICES: dict[str, Any] = compose(secrets())["services"]
OURS = {name: service for name, service in SERVICES.items() if name not in ("redis", "smollm2")}

each = pytest.mark.parametrize("name", SERVICES)
each_of_ours = pytest.mark.parametrize("name", OURS)


def own_settings(name: str) -> Any:
    service, image = SERVICES[name], Image.read(component_of(SERVICES[name]["image"]))
    return settings(image.name, service["command"], {**image.environment, **service["environment"]})


def test_it_keeps_to_the_compose_specification(tool: Callable[..., str]) -> None:
    said = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DOCKER / "compose.yaml"))
    assert said == "ok -- validation done\n"


@pytest.mark.parametrize("secret", secrets())
def test_a_secret_that_is_not_set_stops_everything(secret: str) -> None:
    with pytest.raises(KeyError, match=secret):
        compose({**secrets(), secret: ""})


def test_make_fills_the_file_of_secrets_once(tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    for name in ("Makefile", "docker/.env.example"):
        shutil.copy(ROOT / name, tmp_path / name)
    made = tmp_path / "docker" / ".env"
    subprocess.run(["make", "-C", tmp_path, "docker/.env"], check=True, capture_output=True)
    text = made.read_text()
    subprocess.run(["make", "-C", tmp_path, "docker/.env"], check=True, capture_output=True)
    lines = dict(line.split("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
    assert made.read_text() == text and made.stat().st_mode & 0o777 == 0o600
    assert lines.keys() == secrets().keys()
    assert len(set(lines.values())) == len(lines) and all(len(value) == 48 for value in lines.values())


@each_of_ours
def test_the_product_takes_the_command_and_the_variables(name: str) -> None:
    assert strange_variables(SERVICES[name]["environment"]) == []
    config = own_settings(name)
    if name != "coordinator":
        assert config.coordinator == "coordinator:7700"


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


def test_a_verifier_is_given_longer_than_it_drains() -> None:
    for name in ("verifier-1", "verifier-2"):
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > own_settings(name).drain_s
