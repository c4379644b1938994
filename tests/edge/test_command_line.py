"""Test `outrider-edge` where the contract tests do not: long chats, readers that leave, and missing extras."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_verifier import FakeVerifier, Script
from scripted import tokenizer_json

from edge_agent.cli import main
from edge_agent.target.tokenizer import TargetTokenizer

TEMPLATE = b"{% for m in messages %}{{ m.content }};{% endfor %}"


@pytest.fixture
async def verifier() -> AsyncIterator[FakeVerifier]:
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


def at(verifier: FakeVerifier, tmp_path: Path, *more: str) -> list[str]:
    return ["--verifier", verifier.address, "--cache-dir", str(tmp_path), "--draft", "none", *more]


async def test_a_chat_forgets_its_oldest_turns_rather_than_end(
    verifier: FakeVerifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verifier.script.max_sequence = 60
    said = tmp_path / "said"
    said.write_text("ask one thing\n" * 6)
    with said.open() as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        arguments = at(verifier, tmp_path, "--max-tokens", "8", "--system", "S")
        await asyncio.to_thread(main, ["chat", *arguments])
    assert capsys.readouterr() == ("xxxxxxxx\n" * 6, "")
    table = TargetTokenizer(tokenizer_json()).table
    last = b"".join(table[i] for i in verifier.opens[-1].attach.prompt)
    assert last.startswith(b"S;ask one thing;xxxxxxxx;") and last.endswith(b"ask one thing;") and len(last) <= 60


async def test_a_reader_that_leaves_early_ends_it_quietly(
    verifier: FakeVerifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with io.TextIOWrapper(os.fdopen(writing, "wb")) as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, ["generate", "x", *at(verifier, tmp_path)])
    assert ended.value.code == 141 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("command", "needing", "missing"),
    [
        ("chat --message hi", "edge_agent.target.jinja", "jinja2"),
        ("serve", "edge_agent.http.serve", "edge_agent.http.app"),
    ],
)
async def test_without_the_extra_a_command_says_what_to_install(
    verifier: FakeVerifier,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    needing: str,
    missing: str,
) -> None:
    monkeypatch.delitem(sys.modules, needing, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)  # an import of it raises ImportError
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(main, [*command.split(), *at(verifier, tmp_path)])
    err = capsys.readouterr().err
    assert ended.value.code == 1 and "pip install 'outrider[edge]'" in err and err.count("\n") == 1
