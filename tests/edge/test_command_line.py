"""Test `outrider-edge` as a process: interrupted, cut off, and without its extras."""

from __future__ import annotations

import asyncio
import os
import signal
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


async def test_an_interrupt_ends_a_chat_that_waits_for_a_message(verifier: FakeVerifier, tmp_path: Path) -> None:
    process = await started(["chat", *at(verifier, tmp_path, "--max-tokens", "3")])
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"hi\n")
    assert await asyncio.wait_for(process.stdout.readline(), 20) == b"xxx\n"
    await asyncio.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(_output(process), 10)
    assert (process.returncode, err) == (130, b"")


async def test_a_text_of_a_lossy_acceptance_rule_is_labelled(verifier: FakeVerifier, tmp_path: Path) -> None:
    asked = ["generate", "x", *at(verifier, tmp_path, "--max-tokens", "3"), "--acceptance-rule"]
    process = await started([*asked, "typical"])
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, out, err) == (0, b"xxx\n", b"[lossy, by the acceptance rule typical]\n")
    assert verifier.opens[-1].attach.sampling.typical is not None
    process = await started([*asked, "likely"])
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2 and b"invalid choice: 'likely'" in err


async def test_a_chat_forgets_its_oldest_turns_rather_than_end(verifier: FakeVerifier, tmp_path: Path) -> None:
    verifier.script.max_sequence = 60
    process = await started(["chat", *at(verifier, tmp_path, "--max-tokens", "8", "--system", "S")])
    out, err = await asyncio.wait_for(process.communicate(b"ask one thing\n" * 6), 20)
    assert (process.returncode, err, out) == (0, b"", b"xxxxxxxx\n" * 6)
    table = TargetTokenizer(tokenizer_json()).table
    last = b"".join(table[i] for i in verifier.opens[-1].attach.prompt)
    assert last.startswith(b"S;ask one thing;xxxxxxxx;") and last.endswith(b"ask one thing;") and len(last) <= 60


async def test_a_message_that_is_too_long_by_itself_is_refused(verifier: FakeVerifier, tmp_path: Path) -> None:
    verifier.script.max_sequence = 20
    process = await started(["chat", *at(verifier, tmp_path, "--max-tokens", "8")])
    _, err = await asyncio.wait_for(process.communicate(b"a message of many letters\n"), 20)
    assert process.returncode == 2 and b"prompt plus max_tokens" in err and b"Traceback" not in err


@pytest.mark.parametrize("command", [["generate", "x"], ["chat", "--message", "x"], ["serve"]], ids=" ".join)
async def test_a_draft_that_is_damaged_is_refused_before_the_cluster_is_asked(
    tmp_path: Path, command: list[str]
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 1000)
    process = await started([*command, "--coordinator", "127.0.0.1:1", "--draft", str(damaged)])
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, out) == (2, b"")
    assert err.startswith(f"outrider-edge: --draft {damaged}: no token can be decoded with it: ".encode())


async def test_a_reader_that_leaves_early_ends_it_quietly(verifier: FakeVerifier, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = await started(["generate", "x", *at(verifier, tmp_path)], stdout=writing)
    finally:
        os.close(writing)
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"], ["serve"]], ids=" ".join)
@pytest.mark.parametrize("module", ["argparse", "pydantic", "outrider.telemetry.logs", "edge_agent.sdk.client", "grpc"])
async def test_an_interrupt_during_the_first_imports_ends_a_command_quietly(
    tmp_path: Path, command: list[str], module: str
) -> None:
    ended = await interrupted(module, [*command, "--verifier", "127.0.0.1:1", "--cache-dir", str(tmp_path)])
    assert ended == (130, b"", b"")


@pytest.mark.parametrize("module", ["argparse", "pydantic", "outrider.telemetry.logs"])
async def test_an_interrupt_ends_the_commands_of_releases_quietly(tmp_path: Path, module: str) -> None:
    ended = await interrupted(module, ["releases", "status", "--cache-dir", str(tmp_path)])
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
    for command in ([], ["generate"], ["chat"]):
        process = await started([*command, "--help"], missing="jinja2 tokenizers llama_cpp")
        out, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        assert b"OUTRIDER_EDGE_API_KEY" in out


@pytest.mark.parametrize(
    ("command", "missing"),
    [("chat --message hi", "jinja2"), ("chat --message hi", "tokenizers"), ("serve", "fastapi"), ("serve", "uvicorn")],
)
async def test_without_the_extra_a_command_says_what_to_install(
    verifier: FakeVerifier, tmp_path: Path, command: str, missing: str
) -> None:
    process = await started([*command.split(), *at(verifier, tmp_path)], missing=missing)
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"pip install 'outrider[edge]'" in err and err.count(b"\n") == 1


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ([], "the coordinator at 127.0.0.1:7700 (--coordinator) cannot be reached: nothing listens there"),
        (["--coordinator", "127.0.0.1:1"], "the coordinator at 127.0.0.1:1 (--coordinator) cannot be reached"),
        (["--verifier", "127.0.0.1:1"], "the verifier at 127.0.0.1:1 (--verifier) cannot be reached"),
    ],
)
async def test_a_cluster_that_is_not_there_is_named_with_its_address_and_flag(
    tmp_path: Path, where: list[str], said: str
) -> None:
    process = await started(["generate", "x", "--cache-dir", str(tmp_path), *where])
    _, err = await _output(process)
    if not where and b"cannot be reached" not in err:
        pytest.skip("something listens at the coordinator's default port")
    [line] = err.decode().splitlines()
    assert line.startswith(f"outrider-edge: {said}")
    assert "last error" not in line and "ipv4:" not in line
    assert process.returncode == 1


async def _output(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    """Read the output as `communicate` does, but leave standard input open."""
    assert process.stdout is not None and process.stderr is not None
    out, err = await asyncio.gather(process.stdout.read(), process.stderr.read())
    await process.wait()
    return out, err
