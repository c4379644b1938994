"""`outrider`: the operator's command. It starts the other programs as processes and asks the coordinator."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import grpc

from coordinator.cluster import Cluster
from outrider import __version__
from outrider.core.errors import BadRequest, OutriderError
from outrider.wire.channels import ClientTls, channel
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

DEFAULT_COORDINATOR = "127.0.0.1:7700"
EXIT_FAILED = 1
EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        raise SystemExit(options.run(options))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE if isinstance(error, BadRequest) else EXIT_FAILED) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider", description=__doc__)
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start a coordinator and verifiers here, until Ctrl-C")
    _pair_options(up)
    up.add_argument("--listen", default=DEFAULT_COORDINATOR, help=f"of the coordinator ({DEFAULT_COORDINATOR})")
    up.add_argument("--verifiers", type=int, default=1, help="how many (1)")
    up.add_argument("--redis", default="embedded", help="URL of a Redis server, or `embedded` (the default)")
    up.add_argument("--state-dir", help="where the coordinator keeps its ticket key")
    up.set_defaults(run=lambda options: asyncio.run(_up(options)))

    demo = commands.add_parser("demo", help="text from a device and its verifier, compared with cloud streaming")
    _pair_options(demo)
    demo.add_argument("--quick", action="store_true", help="two prompts, no pauses")
    demo.add_argument("--rtt-ms", type=float, default=30.0, help="of the second, emulated link (30)")
    demo.set_defaults(run=lambda options: asyncio.run(_demo(options)))

    chat = commands.add_parser("chat", help="chat through a running cluster (the device's own command)")
    chat.add_argument("--coordinator", default=DEFAULT_COORDINATOR)
    chat.set_defaults(run=_chat)

    status = commands.add_parser("status", help="verifiers and sessions of a running cluster")
    status.add_argument("--coordinator", default=DEFAULT_COORDINATOR)
    status.add_argument("--ca", type=Path, help="PEM authority, where the coordinator speaks TLS")
    status.add_argument("--insecure", action="store_true", help="plain text beyond loopback")
    status.set_defaults(run=lambda options: asyncio.run(_status(options)))
    return parser


def _pair_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="directory of the target (default: the shipped demo target)")
    parser.add_argument("--draft", type=Path, help="GGUF draft (default: the shipped one, with the shipped target)")


def shipped_pair() -> tuple[Path, Path]:
    """The demo pair in models/ of this checkout or of $OUTRIDER_MODELS. Raises BadRequest where there is none."""
    folder = Path(os.environ.get("OUTRIDER_MODELS") or Path(__file__).resolve().parent.parent / "models")
    target, draft = folder / "target", folder / "draft.gguf"
    if not (target / "config.json").is_file() or not draft.is_file():
        raise BadRequest(
            f"no demo pair in {folder}; give --model DIR and --draft FILE, or set OUTRIDER_MODELS", field="model"
        )
    return target, draft


def _pair(options: argparse.Namespace) -> list[str]:
    """The verifier's flags for target and draft."""
    if options.model is None:
        target, draft = shipped_pair()
        return ["--model", str(target), "--draft", str(options.draft or draft)]
    return ["--model", str(options.model), *(["--draft", str(options.draft)] if options.draft else [])]


async def _up(options: argparse.Namespace) -> int:
    pair = _pair(options)
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with Cluster() as cluster:
        stopping = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(_start(cluster, options, pair))
        await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():  # models take long to load, and Ctrl-C must not wait for them
            starting.cancel()
            await asyncio.wait({starting})
            return 0
        starting.result()
        print(
            f"ready: coordinator at {cluster.address}, {len(cluster.verifiers)} verifier(s); Ctrl-C stops", flush=True
        )
        children = [child for child in (cluster.coordinator, *cluster.verifiers) if child is not None]
        exits = {asyncio.create_task(child.wait()): child for child in children}
        done, _ = await asyncio.wait({stopping, *exits}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, *exits):
            task.cancel()
        ended = [exits[task] for task in done if task is not stopping]
    for child in ended:
        print(f"outrider: {child.name} ended by itself; see its messages above", file=sys.stderr)
    return EXIT_FAILED if ended else 0


async def _start(cluster: Cluster, options: argparse.Namespace, pair: Sequence[str]) -> None:
    state = ["--state-dir", options.state_dir] if options.state_dir else []
    await cluster.start_coordinator("--listen", options.listen, "--redis", options.redis, *state)
    for _ in range(options.verifiers):
        await cluster.start_verifier(*pair)


async def _demo(options: argparse.Namespace) -> int:
    pair = _pair(options)
    with tempfile.TemporaryDirectory(prefix="outrider-demo-") as scratch:
        async with Cluster(logs=Path(scratch)) as cluster:
            print("starting a coordinator (embedded Redis) and a verifier ...", flush=True)
            await cluster.start_coordinator("--listen", "127.0.0.1:0", "--state-dir", scratch)
            verifier = await cluster.start_verifier(*pair)
            command = [sys.executable, "-m", "edge_agent.demo", "--coordinator", cluster.address]
            command += ["--verifier", verifier.address, "--rtt-ms", str(options.rtt_ms)]
            command += ["--quick"] if options.quick else []
            device = await asyncio.create_subprocess_exec(*command)
            try:
                return await device.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    device.terminate()


def _chat(options: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "edge_agent.cli", "chat", "--coordinator", options.coordinator]
    os.execv(sys.executable, command)


async def _status(options: argparse.Namespace) -> int:
    tls = ClientTls(options.ca) if options.ca else None
    token = os.environ.get("OUTRIDER_ADMIN_TOKEN")
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with channel(options.coordinator, tls=tls, insecure=options.insecure) as link:
        admin = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]
        try:
            status = await admin.Status(pb.StatusRequest(), timeout=5.0, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
    print(f"coordinator {options.coordinator}, up {status.uptime_s:.0f} s, store {status.store}")
    print()
    print(_table(_VERIFIER_COLUMNS, [_verifier_row(verifier) for verifier in status.verifiers]))
    print()
    print(_table(_SESSION_COLUMNS, [_session_row(session) for session in status.sessions]))
    return 0


_VERIFIER_COLUMNS = ("VERIFIER", "ADDRESS", "TARGET", "SESSIONS", "STEP", "TOKENS/S", "KV", "LEASE", "STATE")
_SESSION_COLUMNS = ("SESSION", "TENANT", "VERIFIER", "COMMITTED", "TOKENS/STEP", "RTT")


def _verifier_row(verifier: pb.VerifierStatus) -> tuple[str, ...]:
    return (
        verifier.verifier_id,
        verifier.address,
        f"{verifier.target.name} {verifier.target.dtype}",
        f"{verifier.live_sessions}/{verifier.capacity_sessions}",
        f"{verifier.step_ms:.1f} ms",
        f"{verifier.tokens_per_s:.0f}",
        f"{verifier.kv_used}/{verifier.kv_capacity}",
        f"{verifier.lease_s:.1f} s",
        "draining" if verifier.draining else "serving",
    )


def _session_row(session: pb.SessionStatus) -> tuple[str, ...]:
    return (
        session.session_id,
        session.tenant,
        session.verifier_id,
        str(session.committed),
        f"{session.tokens_per_step:.2f}",
        f"{session.rtt_ms:.1f} ms",
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    )


if __name__ == "__main__":
    main()
