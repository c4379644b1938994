"""Test attention in triton kernels: the tables they read, that they compile, and `triton_checks.py` as a process.

There the kernels run on the GPU, or in triton's interpreter where there is none: that is for triton's import to know.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from cloud_verifier.engine.torch_backend.batch import Segment
from cloud_verifier.engine.torch_backend.kernels import step_tables, triton_attention
from cloud_verifier.engine.torch_backend.kernels.triton_attention import choose
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.errors import ModelRefused

HERE = Path(__file__).parent
CHECKS = HERE / "triton_checks.py"
ROOT = HERE.parents[2]
NIGHTLY = pytest.mark.skipif(not os.environ.get("OUTRIDER_NIGHTLY"), reason="runs with OUTRIDER_NIGHTLY=1")
SHARED_BYTES = {"80": 101_376, "90": 232_448}
"""Shared memory of a block on the smallest GPU for this capability: sm_86 and 89 run code for sm_80."""


def in_a_process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": paths} | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """Return name of a check -> (passed, skipped or failed; its message) for each of its cases."""
    pytest.importorskip("triton")
    report = tmp_path_factory.mktemp("triton") / "report.xml"
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    ran = in_a_process("-m", "pytest", str(CHECKS), *options, **interpret)
    if not report.exists():
        pytest.fail(ran.stdout + ran.stderr)
    found: dict[str, list[tuple[str, str]]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        said = [(child.tag, child.text or child.get("message") or "") for child in case if child.tag != "system-out"]
        failed = [text for tag, text in said if tag in ("failure", "error")]
        skipped = [text for tag, text in said if tag == "skipped"]
        kind = "failed" if failed else "skipped" if skipped else "passed"
        found.setdefault(case.get("name", "").split("[")[0], []).append((kind, "\n".join(failed or skipped)))
    return found


def names_of_checks() -> list[str]:
    functions = [node.name for node in ast.parse(CHECKS.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("test_")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", names_of_checks())
def test_on_a_gpu_or_in_the_interpreter(check: str, outcomes: dict[str, list[tuple[str, str]]]) -> None:
    cases = outcomes[check]
    assert not [text for kind, text in cases if kind == "failed"]
    if all(kind == "skipped" for kind, _ in cases):
        pytest.skip(cases[0][1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("groups", "dim", "dtype", "capped", "windowed"),
    [
        (2, 256, "float32", True, True),
        pytest.param(4, 128, "bfloat16", False, False, marks=NIGHTLY),
        pytest.param(16, 128, "float16", False, True, marks=NIGHTLY),
    ],
)
def test_the_kernels_compile_for_gpus_and_fit_them(
    groups: int, dim: int, dtype: str, capped: bool, windowed: bool, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    given = [str(value) for value in (groups, dim, dtype, capped, windowed)]
    ran = in_a_process(str(HERE / "triton_compiles.py"), *given, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert [line[0] for line in lines] == ["80", "90"]
    for capability, *took in lines:
        assert max(map(int, took)) <= SHARED_BYTES[capability]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=NIGHTLY)])
def test_the_kernels_that_choose_tokens_compile_for_gpus(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = str(HERE / "triton_compiles.py")
    ran = in_a_process(script, "race", dtype, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["80", "90"]


def random_segment(start: int, chain: int, nodes: int, rng: np.random.Generator) -> Segment:
    parents = [chain - 1 + int(rng.integers(0, node + 1)) for node in range(nodes)]
    positions = [*range(start, start + chain)]
    for parent in parents:
        positions.append(positions[parent] + 1)
    slots = rng.permutation(100_000)[: start + chain + nodes].astype(np.int32)
    tokens = np.zeros(chain + nodes, dtype=np.int64)
    parts = (np.array(parents, dtype=np.int64), np.array(positions, dtype=np.int64))
    return Segment(tokens, chain, *parts, slots[:start], slots[start:], True)


def array(size: int) -> step_tables.Table:
    return np.full(size, 77, dtype=np.int32)


def seen_by(table: step_tables.Table, width: int, items: int) -> dict[int, list[tuple[int, ...]]]:
    """Return per row the slots of the keys that it sees, in order of key, by the table alone, as the kernels do."""
    seen: dict[int, list[tuple[int, ...]]] = {}
    words = int(table[1])
    at = step_tables.HEADER + 4 * width
    for item in table[at : at + items * step_tables.FIELDS].reshape(items, -1).tolist():
        row, rows, local, start, chain, keys_at, first, end, bits_at = item
        for place in range(rows):
            r, found = local + place, []
            for key in range(first, end):
                own = key - start
                visible = own <= r
                if own >= chain and r >= chain and visible:
                    node = own - chain
                    word = int(table[bits_at + (r - chain) * words + node // 32])
                    visible = bool(word >> node % 32 & 1)
                if visible:
                    found.append(int(table[keys_at + key]))
            seen.setdefault(row + place, []).append(tuple(found))
    return seen


@pytest.mark.parametrize("seed", range(2))
def test_a_table_lets_every_row_see_the_keys_that_its_segment_allows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [(0, 1, 0), (0, 20, 70), (1030, 1, 33), (510, 40, 0), (7, 2, 1), (600, 3, 64)]
    segments = [random_segment(*shapes[place], rng) for place in rng.permutation(len(shapes))]
    rows = sum(segment.rows for segment in segments)
    width = step_tables.width_of(rows)
    table, items = step_tables.build(segments, width, array)
    fields = table[step_tables.HEADER + 4 * width :][: items * step_tables.FIELDS].reshape(items, -1)
    assert (fields[:, 6] < fields[:, 7]).all(), "an item has no keys"
    seen = seen_by(table, width, items)
    sections = table[step_tables.HEADER :][: 4 * width].reshape(4, width)
    row = 0
    for segment in segments:
        visible = segment.visible()
        for r in range(segment.rows):
            expected = [*segment.prefix.tolist(), *segment.slots[visible[r]].tolist()]
            assert [slot for part in seen[row] for slot in part] == expected
            assert sections[0, row] == segment.slots[r]
            assert sections[2, row] == len(seen[row])
            assert sections[3, row] == segment.positions[r]
            row += 1
    assert (sections[0, row:] == -1).all()
    assert not sections[2, row:].any()


def test_auto_is_triton_on_cuda_where_it_is_and_sdpa_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "find_spec", lambda name: object())
    assert choose("auto", torch.device("cuda", 1)) == "triton"
    assert choose("auto", torch.device("cpu")) == "sdpa"
    monkeypatch.setattr(triton_attention, "find_spec", lambda name: None)
    assert choose("auto", torch.device("cuda")) == "sdpa"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_triton_without_cuda_is_refused(tiny_directory: Callable[[str], Path]) -> None:
    with pytest.raises(ModelRefused, match="attention triton needs"):
        TargetModel.load(tiny_directory("llama"), attention="triton")
