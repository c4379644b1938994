"""Test that what pages name of the programs exists: commands with their flags, settings, metrics."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator

import pytest
from pages import PAGES, SITE, blocks, prose, text_of

import edge_agent
from cloud_verifier import app as verifier
from cloud_verifier.distill import cli as distill
from coordinator import app as coordinator
from coordinator.cli import action_of
from coordinator.cli import arguments as operator
from edge_agent import cli as edge
from outrider.settings import variable_of
from tools.reference import MODELS

PARSERS: dict[str, Callable[[list[str]], object]] = {
    "outrider": lambda given: action_of(operator.parse(given)),
    "outrider-coordinator": lambda given: coordinator.parser().parse_args(given),
    "outrider-distill": lambda given: distill.parser().parse_args(given),
    "outrider-edge": lambda given: edge.parser().parse_args(given),
    "outrider-verifier": lambda given: verifier.parser().parse_args(given),
}
VARIABLES = {variable_of(cls, name) for cls in MODELS for name in cls.model_fields}
_OBJECTS = ("OUTRIDER_COORDINATOR_CANARY_", "OUTRIDER_DISTILL_GATE_", "OUTRIDER_DISTILL_TRAINING_OPTIONS_")
"""Settings that are objects, whose parts have variables, too."""
_METRIC = re.compile(r"\boutrider_[a-z_]+\b(?!\.)")


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command of ours in a page's blocks, without what a shell takes out."""
    shown = [line[2:] for block in blocks(page, "console") for line in block.splitlines() if line.startswith("$ ")]
    for text in (*shown, *blocks(page, "sh")):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(re.sub(r"\s[<>]+ ?\S+", "", line), comments=True)
            for part in _parts(words):
                while part and re.match(r"[A-Z_]+=", part[0]):
                    part = part[1:]
                if part and part[0] in PARSERS:
                    yield part


def _parts(words: list[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in words:
        if word in ("|", "&&", ";", "&"):
            yield part
            part = []
        else:
            part.append(word)
    yield part


@pytest.mark.parametrize("page", PAGES)
def test_a_command_of_the_page_is_one_that_there_is(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for program, *given in commands(page):
        try:
            PARSERS[program](given)
        except SystemExit as ended:
            pytest.fail(f"{program} {' '.join(given)}: {capsys.readouterr().err}") if ended.code else None


@pytest.mark.parametrize("page", SITE)
def test_a_command_in_the_text_of_the_page_is_one_that_there_is(page: str) -> None:
    reference = text_of("docs/reference/cli.md")
    for code in re.findall(r"`(outrider(?:-edge|-distill)? [a-z][^`\n]*)`", prose(page)):
        words = [word for word in code.split(" ") if re.fullmatch(r"[a-z]+", word) or word.startswith("outrider")]
        found = {" ".join(words[:count]) for count in (2, 3)}
        assert any(f"### {one}" in reference for one in found), code


@pytest.mark.parametrize("page", PAGES)
def test_a_variable_of_the_page_is_a_setting(page: str) -> None:
    named = set(re.findall(r"\bOUTRIDER_(?:COORDINATOR|VERIFIER|EDGE|DISTILL)_[A-Z_]*[A-Z]\b", text_of(page)))
    assert {name for name in named - VARIABLES if not name.startswith(_OBJECTS)} == set()


@pytest.mark.parametrize("page", SITE)
def test_a_metric_of_the_page_is_exported(page: str) -> None:
    exported = set(_METRIC.findall(text_of("docs/metrics.md")))
    assert set(_METRIC.findall(text_of(page))) <= exported


def test_every_export_of_the_sdk_is_in_its_reference() -> None:
    page = text_of("docs/reference/sdk.md")
    assert [name for name in edge_agent.__all__ if not re.search(rf"\b{name}\b", page)] == []
