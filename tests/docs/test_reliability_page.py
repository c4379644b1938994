"""Test that each promise on the page names what proves it, and that this is there."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec

import pytest
from pages import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text()
PROMISES, FIGURES = PAGE.split("## What was measured")
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", PROMISES, re.MULTILINE)
PROOFS = [(number, proof) for number, _, proofs in ROWS for proof in re.findall(r"`([^`]+)`", proofs)]


def test_every_promise_has_its_row() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 24))
    assert {number for number, _ in PROOFS} == {number for number, *_ in ROWS}


def test_a_promise_that_a_benchmark_proves_has_its_figure() -> None:
    generated = FIGURES.split("-->")[1]
    measured = dict(re.findall(r"^\| (\d+) \| (.+?) \| `benchmarks", generated, re.MULTILINE))
    assert measured.keys() >= {number for number, proof in PROOFS if proof.startswith("benchmarks.")}
    assert all(re.search(r"\d|STABLE|ROLLED_BACK|CANARY|went on", text) for text in measured.values())


@pytest.mark.parametrize(("number", "proof"), PROOFS)
def test_what_proves_a_promise_is_there(number: str, proof: str) -> None:
    file, _, name = proof.partition("::")
    if name:
        tree = ast.parse((ROOT / file).read_text())
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in found
    elif proof.startswith("benchmarks."):
        assert find_spec(proof) is not None
    else:
        assert f'"{proof}' in "".join(path.read_text() for path in (ROOT / "benchmarks" / "chaos").glob("*.py"))
