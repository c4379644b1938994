"""Test the images as far as their files permit without a container engine."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable

import pytest
from container_files import DOCKER, FILES, IMAGES, ROOT, Image, settings, strange_variables

from cloud_verifier import vllm_environment

NEEDED = {
    "coordinator": {},
    "verifier": {"OUTRIDER_VERIFIER_MODEL": "/models/target"},
    "verifier-vllm": {"OUTRIDER_VERIFIER_MODEL": "/models/target"},
    "edge": {"OUTRIDER_EDGE_COORDINATOR": "coordinator:7700"},
}
"""Settings that a user has to give."""

images = pytest.mark.parametrize("image", [Image.read(name) for name in IMAGES], ids=IMAGES)


def test_the_linter_finds_nothing(tool: Callable[..., str]) -> None:
    assert tool("hadolint", *(str(DOCKER / f"{name}.Dockerfile") for name in FILES)) == ""


@images
def test_the_build_sees_every_package_and_no_model_test_or_secret(image: Image) -> None:
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    copies = [rest.split() for rest in image.all("COPY", stage=0)]
    copied = {word for *words, _ in copies for word in words if "/" not in word or word in allowed}
    needless = set() if image.name == "edge" else {"tools/llama_cpp_library.cmake"}
    assert copied == set(allowed) - needless
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    data = {"models/smollm2-draft.gguf", "benchmarks/prompts.jsonl"}  # containers mount models/, and measure nothing
    assert set(packages["only-include"]) - data <= copied
    assert all((ROOT / name).exists() for name in copied)


@images
def test_the_image_own_variables_are_settings_that_hold(image: Image) -> None:
    assert strange_variables(image.environment) == []
    config = settings(image.name, image.command, {**image.environment, **NEEDED[image.name]})
    listen = config.serve_listen if image.name == "edge" else config.listen
    port = int(listen.removeprefix("0.0.0.0:"))
    door = port if image.name == "edge" else int(config.metrics.removeprefix("0.0.0.0:"))
    assert image.ports == {port, door}
    assert image.healthcheck[:4] == ["python", "-m", "outrider.telemetry.healthcheck", str(door)]


def test_the_engine_of_vllm_is_in_its_image_where_the_verifier_looks_for_it() -> None:
    image = Image.read("verifier-vllm")
    [made] = [found for run in image.runs if (found := re.search(r"-m (\S+) (\S+) \$VLLM_OPTIONS", run))]
    assert made[1] == vllm_environment.__name__
    config = settings(image.name, [], {**image.environment, **NEEDED[image.name]})
    assert (config.engine, str(config.engine_python)) == ("vllm", f"{made[2]}/bin/python")
    assert image.all("COPY")[0] == f"--from=build-vllm {made[2]} {made[2]}"
    assert "VLLM_OPTIONS=--gpu" in image.all("ARG", stage=0)
