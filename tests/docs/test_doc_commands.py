"""Test that every command of README and docs runs as shown, unless it is on a short list with reasons."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path

import by_hand
import pytest
import shapes
import yaml
from pages import COMMANDS, DATA, PAGES, PROMPT, SHELL, Block, Step, blocks, steps
from stages import STAGES, Stage
from terminal import Network, Terminal

STARTERS = ("outrider up", "outrider-coordinator ")
"""Commands that start a cluster; a page without one uses a cluster that runs."""


def commands(page: str) -> list[Step]:
    """Return the steps in all blocks of commands of a page."""
    return [step for block in blocks(page) if block.language in COMMANDS for step in steps(block)]


def run(page: str) -> list[Step]:
    """Return the steps of a page that a test runs."""
    return [step for step in commands(page) if by_hand.reason(page, step.command) is None]


def starts_its_own(page: str) -> bool:
    return any(step.command.startswith(STARTERS) for step in run(page))


OWN = [page for page in PAGES if run(page) and starts_its_own(page)]
OTHERS = [page for page in PAGES if run(page) and not starts_its_own(page)]


@pytest.mark.e2e
@pytest.mark.parametrize("page", OWN)
def test_a_page_works_from_its_first_command_to_its_last(page: str, able: None, folder: Path) -> None:
    with Network() as network, Terminal(network, folder) as terminal:
        assert misfits(page, terminal) == []


@pytest.mark.e2e
@pytest.mark.parametrize("page", OTHERS)
def test_a_page_works_beside_a_running_cluster(page: str, shared: Network, folder: Path) -> None:
    with Terminal(shared, folder) as terminal:
        assert misfits(page, terminal) == []


def misfits(page: str, terminal: Terminal) -> list[str]:
    """Return the misfits of the first command that did not do what the page says; later ones may build on it."""
    with STAGES.get(page, Stage)(terminal) as stage:
        for step in run(page):
            if found := misfits_of(step, terminal, stage):
                return found
    return []


def misfits_of(step: Step, terminal: Terminal, stage: Stage) -> list[str]:
    """Run a step, and compare status and output with the page."""
    command = stage.real(step.command)
    result = terminal.python(command) if step.block.language == "python" else terminal.type(command)
    if result is None:
        return []  # it runs on
    found = list(shapes.misfits(step.shown, result.out + result.err)) if step.shown is not None else []
    if result.code != stage.status(step):
        found.append(f"exit status {result.code}, must be {stage.status(step)}")
    if "Traceback" in result.err:
        found.append("a traceback")
    if step.block.language == "python" and "print(" in command and not result.out.strip():
        found.append("it printed nothing")
    return [f"{step.block.place}: {command}", *found, result.out[-3000:], result.err[-3000:]] if found else []


@pytest.mark.parametrize("page", PAGES)
def test_a_block_is_in_a_language_that_is_either_run_or_data(page: str) -> None:
    assert [block.place for block in blocks(page) if block.language not in (*COMMANDS, *DATA)] == []


def test_no_command_hides_in_a_block_of_plain_text() -> None:
    programs = ("outrider", "pip ", "make ", "curl ", "python -m", "docker ", "helm ", "kubectl ", PROMPT)
    for page in PAGES:
        for block in blocks(page):
            if block.language in DATA:
                starting = [line for line in block.text.splitlines() if line.startswith(programs)]
                assert starting == [], block.place


def test_what_is_left_to_hands_is_what_it_says() -> None:
    left = [(page, step) for page in PAGES for step in commands(page) if by_hand.reason(page, step.command)]
    assert left
    assert {f"{s.block.place}: {by_hand.wrong(s.command)}" for _, s in left if by_hand.wrong(s.command)} == set()
    assert by_hand.stale([(page, step.command) for page, step in left]) == []


def test_most_commands_are_run() -> None:
    every = [step for page in PAGES for step in commands(page)]
    assert len([step for page in PAGES for step in run(page)]) > 0.6 * len(every)


@pytest.mark.parametrize("block", [b for p in PAGES for b in blocks(p)], ids=lambda block: block.place)
def test_a_block_of_data_can_be_read(block: Block) -> None:
    readers = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load, "python": ast.parse}
    if block.language in readers:
        assert readers[block.language](block.text) is not None
    elif block.language in SHELL:
        assert steps(block)
