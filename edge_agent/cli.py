"""Run the commands of `outrider-edge`: text, chat, an HTTP server, and a measurement.

Modules that take long to import are imported by the commands that need them, so that `--help` and mistakes in a command
line are answered at once.
"""

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
from typing import TYPE_CHECKING, Any

from edge_agent.bench.command import add_options, bench
from edge_agent.config import EdgeSettings
from outrider import __version__
from outrider.artifacts.hub import Tell, fetch_draft, hub_id
from outrider.artifacts.model_files import check_gguf
from outrider.console_scripts import INTERRUPTED, EndedByInterrupt
from outrider.core.addresses import DEFAULT_COORDINATOR
from outrider.core.errors import TOO_LONG, BadRequest, ModelRefused, OutriderError
from outrider.core.sampling import RULES
from outrider.core.text import Parser
from outrider.settings import add_config_options, add_settings, epilog, settle

if TYPE_CHECKING:
    from edge_agent.sdk.client import AsyncClient
    from edge_agent.sdk.generation import CompletionStream
    from edge_agent.sdk.types import Options
    from edge_agent.target.chat_template import Message

log = logging.getLogger(__name__)

PROGRAM = "outrider-edge"
EXIT_FAILED = 1
"""The request could not be served."""
EXIT_REFUSED = 2
"""The request was wrong, and asking again cannot help. argparse uses the same."""
EXIT_BROKEN_PIPE = 141
"""Nobody reads the output; a program that SIGPIPE ends has the same status."""

_OFFLINE = "draft_only: while no verifier can be reached the draft writes alone, unverified [default: raise]"
_CLUSTER = ("coordinator", "verifier", "target", "tls_ca", "tls_cert", "tls_key", "insecure")
_DEVICE = ("draft", "cache_dir")
_SERVING = ("serve_listen", "serve_without_key", "serve_answer_format", "serve_offline")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line. Raises SystemExit where it fails."""
    args = parser().parse_args(arguments)
    with EndedByInterrupt():
        from outrider.telemetry import logs, traces

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end a generation
    traces.configure("edge")
    logs.configure("edge", "DEBUG" if args.verbose else "INFO" if args.run is _serve else "WARNING")
    try:
        asyncio.run(args.run(args))
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # The rest of the buffer goes nowhere, rather than into an error when Python flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_BROKEN_PIPE) from None
    except (OutriderError, ImportError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED if isinstance(error, BadRequest | ModelRefused) else EXIT_FAILED) from error


async def _generate(args: argparse.Namespace) -> None:
    settings = await _settings(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    async with _client(settings) as client:
        await _print(await client.stream(prompt, **_options(args)), args)


async def _chat(args: argparse.Namespace) -> None:
    messages: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    async with _client(await _settings(args)) as client:
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
    with EndedByInterrupt():
        from edge_agent.http.serve import check, serve

    settings = await _settings(args, check, log.info)
    async with _client(settings, offline=settings.serve_offline) as client:
        await serve(client, settings)


async def _bench(args: argparse.Namespace) -> None:
    await bench(await _settings(args), args)


async def _answer(client: AsyncClient, messages: list[Message], options: Options) -> CompletionStream:
    """Ask for the answer to the last message; drops the oldest turns where the target cannot hold them all."""
    holds = (await client.prepare()).description.max_sequence
    while True:
        try:
            stream = await client.stream_chat(messages, **options)
        except BadRequest as error:
            if error.field != TOO_LONG or not _drop_a_turn(messages):
                raise
            continue
        fits = len(stream.prompt_token_ids) + (options.get("max_tokens") or 0) <= holds
        if fits or not holds or not _drop_a_turn(messages):
            return stream
        await stream.aclose()


def _drop_a_turn(messages: list[Message]) -> bool:
    """Drop the oldest question and its answer; False where only the last question is left."""
    questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(questions) < 2:
        return False
    del messages[questions[0] : questions[1]]
    return True


async def _ask(args: argparse.Namespace) -> str | None:
    """Read the user's next message; None at the end of input."""
    if args.message is not None:
        return str(args.message)
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    # A daemon thread reads it, past Python's buffer, whose lock would otherwise be held at exit: Ctrl-C ends the
    # program although nothing can interrupt the read.
    loop = asyncio.get_running_loop()
    read: asyncio.Future[bytes] = loop.create_future()

    def arrived(line: bytes) -> None:
        if not read.done():
            read.set_result(line)

    def reading() -> None:
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as terminal:
            line = terminal.readline()
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the line is not wanted any more
            loop.call_soon_threadsafe(arrived, line)

    threading.Thread(target=reading, name="outrider-stdin", daemon=True).start()
    line = (await read).decode(errors="replace")
    return line.rstrip("\n") if line else None


async def _print(stream: CompletionStream, args: argparse.Namespace) -> str:
    """Print the text as it comes, and return all of it."""
    async with stream:
        async for chunk in stream:
            print(chunk.text, end="", flush=True)
    print(flush=True)
    completion = stream.completion
    if args.stats:
        print(f"[{completion.finish_reason}; seed {completion.seed}] {stream.statistics.summary()}", file=sys.stderr)
    elif completion.lossy:
        print(f"[lossy, by the acceptance rule {completion.acceptance_rule}]", file=sys.stderr)
    return completion.text


def _say(text: str) -> None:
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


async def _settings(
    args: argparse.Namespace, check: Callable[[EdgeSettings], None] = lambda settings: None, tell: Tell = _say
) -> EdgeSettings:
    """Return the settings of a command line, with the address of a cluster and the path of a draft that they name.

    A draft on the hub is fetched; `tell` is called with how far that is. Each has decoded a token in a child process.
    Nothing has asked the cluster yet. check: raises BadRequest for settings that are wrong for the command. Raises
    ModelRefused, Unavailable, or ImportError.
    """
    settings = settle(EdgeSettings, args, PROGRAM, check)
    check(settings)
    if not settings.coordinator and not settings.verifier:
        settings = settings.model_copy(update={"coordinator": DEFAULT_COORDINATOR})
    with EndedByInterrupt():
        from edge_agent.drafting.loading import NGRAM
        from edge_agent.target.bundle import AUTO, NO_DRAFT
        from outrider.llama.trial import try_draft

    if settings.draft in ("", NO_DRAFT, AUTO, NGRAM):
        return settings
    paths = []
    for given in settings.draft.split(","):
        path = Path(given)
        if hub_id(given) is not None:
            path = fetch_draft(given, tell=tell)
        check_gguf(path, others="auto, ngram or none")
        if without := await asyncio.to_thread(try_draft, path):
            raise ImportError(without)
        paths.append(str(path))
    return settings.model_copy(update={"draft": ",".join(paths)})


def _client(settings: EdgeSettings, **defaults: Any) -> AsyncClient:
    """defaults: options of all requests. Raises BadRequest."""
    with EndedByInterrupt():
        from edge_agent.sdk.client import AsyncClient

    return AsyncClient(settings=settings, **defaults)


def _options(args: argparse.Namespace) -> Options:
    from edge_agent.sdk.types import Options

    given = {name: value for name in Options.__annotations__ if (value := getattr(args, name, None)) is not None}
    return Options(**given)  # type: ignore[typeddict-item, no-any-return]


def parser() -> argparse.ArgumentParser:
    text = "Text and chat from the terminal, drafted on this device, an HTTP server, and what drafts gain."
    made = Parser(prog=PROGRAM, description=text, epilog=epilog(EdgeSettings))
    made.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}", help="show it and exit")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    generate = _command(commands, "generate", _generate, "continue a text")
    generate.add_argument("prompt", metavar="PROMPT", help='the text to continue; "-" reads it from standard input')
    chat = _command(commands, "chat", _chat, "chat in the terminal; --message sends a single message")
    chat.add_argument("--message", help="send this message and exit after the answer [default: ask for messages]")
    chat.add_argument("--system", default="", help="begin with this system message [default: none]")
    serve = _command(commands, "serve", _serve, "an OpenAI-compatible HTTP server on this device", sampling=False)
    add_settings(serve.add_argument_group("serving"), EdgeSettings, _SERVING)
    measured = _command(commands, "bench", _bench, "measure a cluster with drafts and without", sampling=False)
    add_options(measured.add_argument_group("what is measured"))
    return made


def _command(
    commands: Any, name: str, run: Callable[..., Any], text: str, *, sampling: bool = True
) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, epilog=epilog(EdgeSettings))
    made.usage = f"%(prog)s [OPTION ...]{' PROMPT' if name == 'generate' else ''}"
    made.set_defaults(run=run)
    add_settings(made.add_argument_group("cluster"), EdgeSettings, _CLUSTER)
    device = made.add_argument_group("on this device")
    add_config_options(device, EdgeSettings)
    add_settings(device, EdgeSettings, _DEVICE)
    device.add_argument("--verbose", action="store_true", help="log everything to standard error")
    advanced = EdgeSettings.model_fields.keys() - {*_CLUSTER, *_DEVICE, *_SERVING}
    add_settings(made.add_argument_group("advanced"), EdgeSettings, advanced)
    if sampling:
        device.add_argument("--stats", action="store_true", help="print statistics to standard error")
        _add_limits(made.add_argument_group("each request"))
        _add_sampling(made.add_argument_group("sampling"))
    return made


def _add_limits(group: Any) -> None:
    """Add the options of one request that decide how long it is tried."""
    text = "seconds that it may take [default: 600, 120 to the first token]"
    group.add_argument("--timeout", type=float, metavar="SECONDS", help=text)
    text = "how often it may begin again before its first token [default: 2]"
    group.add_argument("--retries", type=int, metavar="N", help=text)
    group.add_argument("--offline", choices=("raise", "draft_only"), help=_OFFLINE)


def _add_sampling(group: Any) -> None:
    def add(flag: str, kind: type, text: str) -> None:
        group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)

    add("--max-tokens", int, "generate so many tokens at most [default: 256]")
    add("--temperature", float, "0 is greedy, 1 the target's own distribution [default: 0]")
    add("--top-k", int, "keep the N most likely tokens; 0 is off [default: 0]")
    add("--top-p", float, "keep the most likely tokens with so much probability; 1 is off [default: 1]")
    add("--min-p", float, "drop tokens less likely than this share of the first; 0 is off [default: 0]")
    text = "divide positive and multiply negative logits of tokens in prompt or output by X; 1 is off [default: 1]"
    add("--repetition-penalty", float, text)
    add("--presence-penalty", float, "subtract X from the logits of tokens in the output; 0 is off [default: 0]")
    add("--frequency-penalty", float, "subtract X for each time that it is in the output; 0 is off [default: 0]")
    add("--seed", int, "64 bits; the same one gives the same text [default: random]")
    text = "end before this; may be given several times [default: none]"
    group.add_argument("--stop", action="append", metavar="TEXT", help=text)
    text = '"typical" accepts likely draft tokens as well, so that the text is lossy [default: coupled]'
    group.add_argument("--acceptance-rule", choices=RULES, help=text)


if __name__ == "__main__":
    main()
