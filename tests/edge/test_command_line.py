"""Test `outrider-edge` as a process: interrupted, cut off, and without its extras."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from fake_verifier import FakeVerifier, Script
from scripted import tokenizer_json

from edge_agent.target.tokenizer import TargetTokenizer

TEMPLATE = b"{% for m in messages %}{{ m.content }};{% endfor %}"
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
for missing in sys.argv.pop(1).split():
    sys.modules[missing] = None
from edge_agent.cli import main
main()
"""

INTERRUPTED_AT_IMPORT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
awaited = sys.argv[1]

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == awaited:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
del sys.argv[1]
from outrider.console_scripts import edge
edge()
"""


@pytest.fixture
async def verifier(tiny_gguf: Path) -> AsyncIterator[FakeVerifier]:
    tokenizer = TargetTokenizer(tokenizer_json())
    (letter,) = tokenizer.encode_plain("x")
    script = Script(
        lambda _: letter,
        vocabulary_size=len(tokenizer.table),
        tokenizer_json=tokenizer_json(),
        artifacts={"template": TEMPLATE},
    )
    async with FakeVerifier(script) as running:
        yield running


async def started(
    arguments: Sequence[str], *, missing: str = "", stdout: int = asyncio.subprocess.PIPE
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        missing,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
    )


def at(verifier: FakeVerifier, tmp_path: Path, *more: str) -> list[str]:
    return ["--verifier", verifier.address, "--cache-dir", str(tmp_path), "--draft", "none", *more]


async def test_a_chat_forgets_its_oldest_turns_rather_than_end(verifier: FakeVerifier, tmp_path: Path) -> None:
    verifier.script.max_sequence = 60
    process = await started(["chat", *at(verifier, tmp_path, "--max-tokens", "8", "--system", "S")])
    out, err = await asyncio.wait_for(process.communicate(b"ask one thing\n" * 6), 20)
    assert (process.returncode, err, out) == (0, b"", b"xxxxxxxx\n" * 6)
    table = TargetTokenizer(tokenizer_json()).table
    last = b"".join(table[i] for i in verifier.opens[-1].attach.prompt)
    assert last.startswith(b"S;ask one thing;xxxxxxxx;") and last.endswith(b"ask one thing;") and len(last) <= 60


async def test_a_reader_that_leaves_early_ends_it_quietly(verifier: FakeVerifier, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = await started(["generate", "x", *at(verifier, tmp_path)], stdout=writing)
    finally:
        os.close(writing)
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("command", [["generate", "x"], ["serve"]], ids=" ".join)
@pytest.mark.parametrize("module", ["argparse", "edge_agent.sdk.client"])
async def test_an_interrupt_during_the_first_imports_ends_a_command_quietly(
    tmp_path: Path, command: list[str], module: str
) -> None:
    ended = await interrupted(module, [*command, "--verifier", "127.0.0.1:1", "--cache-dir", str(tmp_path)])
    assert ended == (130, b"", b"")


async def interrupted(module: str, arguments: Sequence[str]) -> tuple[int | None, bytes, bytes]:
    """Return exit status, stdout and stderr of a command that is interrupted when it begins to import `module`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", INTERRUPTED_AT_IMPORT, module, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out, err


async def test_help_names_the_api_keys_variable_and_needs_no_extra() -> None:
    for command in ([], ["generate"]):
        process = await started([*command, "--help"], missing="jinja2 tokenizers llama_cpp")
        out, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        assert b"OUTRIDER_EDGE_API_KEY" in out


@pytest.mark.parametrize(
    ("command", "missing"),
    [("chat --message hi", "jinja2"), ("serve", "uvicorn")],
)
async def test_without_the_extra_a_command_says_what_to_install(
    verifier: FakeVerifier, tmp_path: Path, command: str, missing: str
) -> None:
    process = await started([*command.split(), *at(verifier, tmp_path)], missing=missing)
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"pip install 'outrider[edge]'" in err and err.count(b"\n") == 1
