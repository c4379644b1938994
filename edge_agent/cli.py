"""`outrider-edge`: text and chat from the terminal, drafted on this device, and what its draft releases are."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from edge_agent.client import AsyncClient
from edge_agent.completion import TOO_LONG, Options
from edge_agent.completion_stream import CompletionStream
from edge_agent.config import EdgeSettings
from edge_agent.kit import LOOKUP
from edge_agent.releases.commands import add_commands
from edge_agent.template import Message
from outrider import __version__
from outrider.core.errors import BadRequest, ModelRefused, OutriderError, VocabularyMismatch
from outrider.telemetry import traces
from outrider.telemetry.logs import FORMATS, LogFormat, configure

EXIT_FAILED = 1
"""The request could not be served."""
EXIT_REFUSED = 2
"""It was wrong; asking again cannot help. argparse uses the same."""
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""Nobody reads what we print; as a program that SIGPIPE ends."""

_NONE = "none"
_OFFLINE = "draft_only: where no verifier can be reached the draft writes alone, unverified (default: raise)"
_ENVIRONMENT = (
    "The API key that a coordinator may ask for is read from OUTRIDER_EDGE_API_KEY, where no list of processes shows "
    "it, and the key that clients of `serve` must send from OUTRIDER_EDGE_SERVE_API_KEY; every other setting has a "
    "variable too, such as OUTRIDER_EDGE_COORDINATOR."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    args = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end a generation
    traces.configure("edge")
    configure(_log_format(args), "edge", logging.DEBUG if args.verbose else logging.WARNING)
    try:
        asyncio.run(args.run(args))
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # What is still in the buffer goes nowhere, rather than into an error when Python flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_BROKEN_PIPE) from None
    except (BadRequest, ModelRefused, VocabularyMismatch) as error:
        raise SystemExit(_tell(error, EXIT_REFUSED)) from error
    except (OutriderError, ImportError) as error:
        raise SystemExit(_tell(error, EXIT_FAILED)) from error


async def _generate(args: argparse.Namespace) -> None:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    async with _client(args) as client:
        await _print(await client.stream(prompt, **_options(args)), args)


async def _chat(args: argparse.Namespace) -> None:
    messages: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    async with _client(args) as client:
        await client.prepare()
        while (line := await _ask(args)) is not None:
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            answer = await _print(await _answer(client, messages, _options(args)), args)
            messages.append({"role": "assistant", "content": answer})
            if args.message is not None:
                return


async def _serve(args: argparse.Namespace) -> None:
    from edge_agent.http.options import ServeOptions
    from edge_agent.http.serve import serve

    settings = _settings(args)
    key = settings.serve_api_key
    options = ServeOptions(
        listen=args.listen or settings.serve_listen,
        api_key=key.get_secret_value() if key is not None else None,
        cors_origins=tuple(args.cors_origin or filter(None, settings.serve_cors_origins.split(","))),
        insecure=settings.insecure,
    )
    options.check()
    async with _client(args, **_terms(args)) as client:
        await serve(client, options)


async def _answer(client: AsyncClient, messages: list[Message], options: Options) -> CompletionStream:
    """The answer to the last message; the oldest turns are forgotten where the target cannot hold them all."""
    while True:
        try:
            return await client.stream_chat(messages, **options)
        except BadRequest as error:
            if error.field not in TOO_LONG or not _forget_a_turn(messages):
                raise


def _forget_a_turn(messages: list[Message]) -> bool:
    """Drop the oldest question and its answer; False where only the last question is left."""
    questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(questions) < 2:
        return False
    del messages[questions[0] : questions[1]]
    return True


async def _ask(args: argparse.Namespace) -> str | None:
    """The user's next message; None at the end of input."""
    if args.message is not None:
        return str(args.message)
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    line = await _line()
    return line.rstrip("\n") if line else None


async def _line() -> str:
    """A line of standard input, "" at its end.

    It is read on a daemon thread and past Python's buffer, whose lock would otherwise be held at exit: Ctrl-C ends the
    program although nobody can interrupt the read.
    """
    loop = asyncio.get_running_loop()
    read: asyncio.Future[bytes] = loop.create_future()

    def arrived(line: bytes) -> None:
        if not read.done():
            read.set_result(line)

    def reading() -> None:
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as terminal:
            line = terminal.readline()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            loop.call_soon_threadsafe(arrived, line)

    threading.Thread(target=reading, name="outrider-stdin", daemon=True).start()
    return (await read).decode(errors="replace")


async def _print(stream: CompletionStream, args: argparse.Namespace) -> str:
    """Print the text as it comes; returns all of it."""
    async with stream:
        async for chunk in stream:
            print(chunk.text, end="", flush=True)
    print(flush=True)
    completion = stream.completion
    if args.stats:
        print(f"[{completion.finish_reason}; seed {completion.seed}] {stream.statistics.summary()}", file=sys.stderr)
    return completion.text


def _log_format(args: argparse.Namespace) -> LogFormat:
    """A flag over the environment; settings that are wrong are told by the command itself."""
    given: LogFormat | None = getattr(args, "log_format", None)
    with contextlib.suppress(ValidationError):
        return given or EdgeSettings().log_format
    return "text"


def _settings(args: argparse.Namespace) -> EdgeSettings:
    """Flags over environment over defaults. Raises BadRequest."""
    names = ("target", "tls_ca", "tls", "insecure", "cache_dir", "draft", "coordinator", "verifier")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.coordinator or args.verifier:
        given = {"coordinator": "", "verifier": "", **given}
    try:
        return EdgeSettings(**given)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise BadRequest(problems) from error


def _client(args: argparse.Namespace, **terms: Any) -> AsyncClient:
    """terms: what its requests have in common."""
    settings = _settings(args)
    draft = None if settings.draft in ("", _NONE) else settings.draft
    if draft not in (None, "auto", LOOKUP) and not Path(str(draft)).is_file():
        raise BadRequest(f"--draft is {draft!r}, must be auto, lookup, none or a GGUF file", field="draft")
    return AsyncClient(draft=draft, settings=settings, **terms)


def _terms(args: argparse.Namespace) -> dict[str, Any]:
    names = ("timeout", "retries", "offline")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _options(args: argparse.Namespace) -> Options:
    given = {name: value for name in Options.__annotations__ if (value := getattr(args, name, None)) is not None}
    options: Options = Options(**given)  # type: ignore[typeddict-item]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider-edge", description=__doc__, epilog=_ENVIRONMENT)
    parser.add_argument("--version", action="version", version=f"outrider-edge {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = _command(commands, "generate", _generate, "continue a text")
    generate.add_argument("prompt", help='the text to continue; "-" reads it from standard input')
    chat = _command(commands, "chat", _chat, "talk, one message per line; a single one with --message")
    chat.add_argument("--message", help="say this, print the answer and leave")
    chat.add_argument("--system", default="", help="what the assistant is told first")
    serve = _command(commands, "serve", _serve, "an OpenAI-compatible HTTP server on this device", sampling=False)
    here = serve.add_argument_group("serving")
    here.add_argument("--listen", help="HOST:PORT (default: 127.0.0.1:8080); beyond loopback it needs a key")
    here.add_argument("--cors-origin", action="append", help='let pages of this origin ask; "*" is any')
    add_commands(commands)
    return parser


def _command(
    commands: Any, name: str, run: Callable[..., Any], text: str, *, sampling: bool = True
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, epilog=_ENVIRONMENT)
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
    here.add_argument("--verbose", action="store_true", help="log everything to standard error")
    here.add_argument("--log-format", choices=FORMATS, help="json: an object a line (default: text)")
    terms = parser.add_argument_group("each request")
    terms.add_argument("--timeout", type=float, help="seconds that it may take (default: 600, 120 to the first token)")
    terms.add_argument("--retries", type=int, help="how often it may begin again before its first token (default: 2)")
    terms.add_argument("--offline", choices=("raise", "draft_only"), help=_OFFLINE)
    if sampling:
        here.add_argument("--stats", action="store_true", help="print statistics to standard error")
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
