"""`outrider-edge`: text and chat from the terminal, drafted on this device."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from edge_agent.client import AsyncClient
from edge_agent.completion import Options
from edge_agent.completion_stream import CompletionStream
from edge_agent.config import EdgeSettings
from edge_agent.kit import LOOKUP
from outrider.core.errors import BadRequest, ModelRefused, OutriderError, VocabularyMismatch

EXIT_FAILED = 1
"""The request could not be served."""
EXIT_REFUSED = 2
"""It was wrong; asking again cannot help. argparse uses the same."""
EXIT_INTERRUPTED = 130

_NONE = "none"


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.WARNING,
        format="%(asctime)s edge %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    try:
        asyncio.run(args.run(args))
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except (BadRequest, ModelRefused, VocabularyMismatch) as error:
        raise SystemExit(_tell(error, EXIT_REFUSED)) from error
    except (OutriderError, ImportError) as error:
        raise SystemExit(_tell(error, EXIT_FAILED)) from error


async def _generate(args: argparse.Namespace) -> None:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    async with _client(args) as client:
        await _print(await client.stream(prompt, **_options(args)), args)


async def _chat(args: argparse.Namespace) -> None:
    messages = [{"role": "system", "content": args.system}] if args.system else []
    async with _client(args) as client:
        await client.prepare()
        while (line := await _ask(args)) is not None:
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            answer = await _print(await client.stream_chat(messages, **_options(args)), args)
            messages.append({"role": "assistant", "content": answer})
            if args.message is not None:
                return


async def _ask(args: argparse.Namespace) -> str | None:
    """The user's next message; None at the end of input."""
    if args.message is not None:
        return str(args.message)
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    line = await asyncio.to_thread(sys.stdin.readline)
    return line.rstrip("\n") if line else None


async def _print(stream: CompletionStream, args: argparse.Namespace) -> str:
    """Print the text as it comes; returns all of it."""
    async with stream:
        async for chunk in stream:
            print(chunk.text, end="", flush=True)
    print()
    completion = stream.completion
    if args.stats:
        print(f"[{completion.finish_reason}; seed {completion.seed}] {stream.statistics.summary()}", file=sys.stderr)
    return completion.text


def _client(args: argparse.Namespace) -> AsyncClient:
    """Flags over environment over defaults."""
    names = ("target", "tls_ca", "tls", "insecure", "cache_dir", "draft", "coordinator", "verifier")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.coordinator or args.verifier:
        given = {"coordinator": "", "verifier": "", **given}
    try:
        settings = EdgeSettings(**given)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise BadRequest(problems) from error
    draft = None if settings.draft in ("", _NONE) else settings.draft
    if draft not in (None, "auto", LOOKUP) and not Path(str(draft)).is_file():
        raise BadRequest(f"--draft is {draft!r}, must be auto, lookup, none or a GGUF file", field="draft")
    return AsyncClient(draft=draft, settings=settings)


def _options(args: argparse.Namespace) -> Options:
    given = {name: value for name in Options.__annotations__ if (value := getattr(args, name, None)) is not None}
    options: Options = Options(**given)  # type: ignore[typeddict-item]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider-edge", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = _command(commands, "generate", _generate, "continue a text")
    generate.add_argument("prompt", help='the text to continue; "-" reads it from standard input')
    chat = _command(commands, "chat", _chat, "talk, one message per line; a single one with --message")
    chat.add_argument("--message", help="say this, print the answer and leave")
    chat.add_argument("--system", default="", help="what the assistant is told first")
    return parser


def _command(commands: Any, name: str, run: Callable[..., Any], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    where = parser.add_argument_group("where to")
    where.add_argument("--coordinator", help="host:port; it names the verifier")
    where.add_argument("--verifier", help="host:port of one verifier, instead of a coordinator")
    where.add_argument("--target", help="name of the target, where the cluster serves several")
    where.add_argument("--tls", action="store_true", default=None, help="speak TLS with gRPC's own authorities")
    where.add_argument("--tls-ca", type=Path, help="speak TLS, trusting this PEM file")
    where.add_argument("--insecure", action="store_true", default=None, help="allow plain text beyond loopback")
    here = parser.add_argument_group("on this device")
    here.add_argument("--draft", help="auto, lookup, none, or a GGUF file (default: auto)")
    here.add_argument("--cache-dir", type=Path, help="where artifacts are kept (default: the user's cache)")
    here.add_argument("--stats", action="store_true", help="print statistics to standard error")
    here.add_argument("--verbose", action="store_true", help="log everything to standard error")
    _add_sampling(parser.add_argument_group("what to generate"))
    return parser


def _add_sampling(group: Any) -> None:
    group.add_argument("--max-tokens", type=int, help="at most so many (default: 256)")
    group.add_argument("--temperature", type=float, help="0 is greedy (default)")
    group.add_argument("--top-k", type=int, help="keep the k most likely tokens; 0 is off")
    group.add_argument("--top-p", type=float, help="keep the most likely tokens with so much probability; 1 is off")
    group.add_argument("--min-p", type=float, help="drop tokens less likely than this share of the first; 0 is off")
    group.add_argument("--repetition-penalty", type=float, help="1 is off")
    group.add_argument("--presence-penalty", type=float, help="0 is off")
    group.add_argument("--frequency-penalty", type=float, help="0 is off")
    group.add_argument("--seed", type=int, help="64 bits; random unless given")
    group.add_argument("--stop", action="append", help="end before this text; may be given several times")


def _tell(error: Exception, code: int) -> int:
    print(f"outrider-edge: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
