"""Read containers from the files in docker/, and interpret their commands and variables as the product does."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloud_verifier import app as verifier_app
from cloud_verifier.config import VerifierConfig
from coordinator import app as coordinator_app
from coordinator.config import CoordinatorConfig
from edge_agent import cli as edge_cli
from edge_agent.config import EdgeSettings
from outrider.settings import layers_of

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
CHART = DOCKER / "helm" / "outrider"
FILES = ("coordinator", "verifier", "edge")
"""Names of the Dockerfiles; each makes the image of its name by default."""
IMAGES = (*FILES, "verifier-vllm")
PROGRAMS: Mapping[str, tuple[Any, Any]] = {
    "coordinator": (coordinator_app.parser, CoordinatorConfig),
    "verifier": (verifier_app.parser, VerifierConfig),
    "verifier-vllm": (verifier_app.parser, VerifierConfig),
    "edge": (edge_cli.parser, EdgeSettings),
}
"""Image -> its program's parser and settings."""
SETTINGS = re.compile(r"OUTRIDER_(COORDINATOR|VERIFIER|EDGE)_(\w+)")
_VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?::([-?])([^}]*))?\}")

Instruction = tuple[str, str]


@dataclass(frozen=True)
class Image:
    """Hold what makes an image. stages: the instructions of the stage that builds, and of the one that runs, with
    those of the stage that it is based on."""

    name: str
    stages: tuple[tuple[Instruction, ...], ...]

    @classmethod
    def read(cls, name: str) -> Image:
        lines = (DOCKER / f"{name.partition('-')[0]}.Dockerfile").read_text().splitlines()
        text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
        whole = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
        stages: dict[str, tuple[Instruction, ...]] = {}
        for word, rest in ((line.partition(" ")[0], line.partition(" ")[2].strip()) for line in whole):
            if word == "FROM":
                base, _, alias = rest.partition(" AS ")
                stage = alias or name.partition("-")[0]
                stages[stage] = stages.get(base, ())
            elif stages:
                stages[stage] += ((word, rest),)
        [build] = {rest.split()[0] for word, rest in stages[name] if word == "COPY"}
        return cls(name, (stages[build.removeprefix("--from=")], stages[name]))

    def all(self, word: str, stage: int = -1) -> list[str]:
        return [rest for name, rest in self.stages[stage] if name == word]

    def one(self, word: str) -> str:
        [rest] = self.all(word)
        return rest

    @property
    def runs(self) -> list[str]:
        """Return the RUN instructions of all stages."""
        return [rest for stage in self.stages for word, rest in stage if word == "RUN"]

    @property
    def environment(self) -> dict[str, str]:
        pairs = [pair.split("=", 1) for rest in self.all("ENV") for pair in shlex.split(rest)]
        return {name: value for name, value in pairs if name != "PATH"}

    @property
    def command(self) -> list[str]:
        return [str(word) for rest in self.all("CMD") for word in json.loads(rest)]

    @property
    def healthcheck(self) -> list[str]:
        return [str(word) for word in json.loads(self.one("HEALTHCHECK").partition("CMD ")[2])]

    @property
    def ports(self) -> set[int]:
        return {int(port) for port in self.one("EXPOSE").split()}


def filled_in(text: str, values: Mapping[str, str]) -> str:
    """Return the text with variables put in as `docker compose` does. Raises KeyError if a required one is not set."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        if name is None:
            return "$"
        if values.get(name):
            return values[name]
        if kind == "-":
            return str(rest)
        raise KeyError(name)

    return _VARIABLE.sub(value, text)


def compose(values: Mapping[str, str]) -> dict[str, Any]:
    """Return docker/compose.yaml with these variables. Raises KeyError for a required one that is not set."""
    read: dict[str, Any] = yaml.safe_load(filled_in((DOCKER / "compose.yaml").read_text(), values))
    return read


def component_of(image: str) -> str:
    """Return an image's name without prefix and tag: one of IMAGES."""
    return image.rpartition("/")[2].partition(":")[0].removeprefix("outrider-")


def secrets() -> dict[str, str]:
    """Return the variables that docker/.env.example leaves empty, with values."""
    names = re.findall(r"^(\w+)=$", (DOCKER / ".env.example").read_text(), re.MULTILINE)
    return {name: f"{name.lower().replace('_', '')}0123456789abcdef" for name in names}


def settings(component: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Return the product's settings by a container's command and variables. Fails if the product refuses them."""
    parser, model = PROGRAMS[component]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return layers_of(model, parser().parse_args(arguments)).load()


def strange_variables(environment: Mapping[str, str]) -> list[str]:
    """Return variables that look like settings and are none, so that the product would ignore them."""
    fields = {component.upper(): model for component, (_, model) in PROGRAMS.items()}
    found = [(name, SETTINGS.fullmatch(name)) for name in environment if name.startswith("OUTRIDER_")]
    return [
        name
        for name, match in found
        if name != "OUTRIDER_ADMIN_TOKEN" and not (match and match[2].lower() in fields[match[1]].model_fields)
    ]
