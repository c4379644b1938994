"""`outrider-verifier`: one target, served to many devices."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from cloud_verifier.config import INSTALL, VerifierConfig
from cloud_verifier.heap import give_back_what_is_freed
from outrider.core.errors import OutriderError
from outrider.telemetry import traces
from outrider.telemetry.logs import FORMATS, configure

EXIT_REFUSED = 2


def parse(arguments: Sequence[str] | None = None) -> VerifierConfig:
    """Flags over environment over defaults. Exits with a readable message on a bad value."""
    parser = argparse.ArgumentParser(
        prog="outrider-verifier",
        description="Serve one target to many devices. Every option, and every setting of cloud_verifier/config.py, can"
        " also be set as OUTRIDER_VERIFIER_<NAME>; the cluster's join token only as OUTRIDER_VERIFIER_JOIN_TOKEN.",
    )
    parser.add_argument("--model", type=Path, help="directory of a Hugging Face causal LM with safetensors weights")
    parser.add_argument("--name", help="the target's name in the cluster (default: the directory's name)")
    parser.add_argument("--draft", type=Path, help="GGUF file offered to devices as the draft")
    parser.add_argument("--listen", help="host:port, port 0 for a free one (default: 127.0.0.1:0)")
    parser.add_argument("--advertise", help="host:port under which devices reach this verifier")
    parser.add_argument("--verifier-id", help="stable name of this verifier (default: random)")
    parser.add_argument("--coordinator", help="host:port of the coordinator; without one, no tickets are asked for")
    parser.add_argument("--open-to-all", action="store_true", default=None, help="serve strangers beyond loopback")
    parser.add_argument("--coordinator-ca", type=Path, help="PEM authority of a coordinator that speaks TLS")
    parser.add_argument("--tls-cert", type=Path, help="PEM certificate chain")
    parser.add_argument("--tls-key", type=Path, help="PEM private key")
    parser.add_argument("--insecure", action="store_true", default=None, help="allow plain text beyond loopback")
    parser.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16"], help="default: auto, bfloat16 on cuda and float32 elsewhere"
    )
    parser.add_argument(
        "--attention",
        choices=["auto", "sdpa", "exact", "triton"],
        help="exact: the same bits in every batch, tree and chunk (default: auto, triton on cuda and sdpa elsewhere)",
    )
    parser.add_argument(
        "--colocated-draft", type=Path, help="GGUF draft with which to draft here for devices that draft nothing"
    )
    parser.add_argument("--colocated-depth", type=int, help="tokens that it drafts ahead (default: 4)")
    parser.add_argument(
        "--colocated-always",
        dest="colocated_pauses",
        action="store_const",
        const=False,
        help="draft in every step, even where it does not pay (default: pause there)",
    )
    parser.add_argument("--device", help="cpu or cuda (default: cpu)")
    parser.add_argument("--threads", type=int, help="CPU threads of the forward pass (default: 1)")
    parser.add_argument("--tensor-parallel", type=int, help="processes or GPUs that share the target (default: 1)")
    parser.add_argument("--kv-slots", type=int, help="tokens whose keys and values are held (default: 32768)")
    parser.add_argument("--max-sessions", type=int, help="sessions served at once (default: 64)")
    parser.add_argument("--nodes-per-step", type=int, help="k: nodes one step takes from one session (default: 10)")
    parser.add_argument("--patience-ms", type=int, help="wait for a device's nodes before a plain step (default: 8)")
    parser.add_argument("--price", type=float, help="least survival (0..1) that a node is worth sending at")
    parser.add_argument(
        "--traffic", help="directory or URL for the traffic log of tenants that allow it (default: none)"
    )
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve /metrics and /healthz there (default: nowhere)")
    parser.add_argument("--log-format", choices=FORMATS, help="json: an object a line (default: text)")
    given = {key: value for key, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        return VerifierConfig(**given)
    except ValidationError as error:
        # Without the values: they may be secrets.
        problems = [
            f"{'.'.join(map(str, e['loc'])) or 'options'}: {e['msg']}" for e in error.errors(include_input=False)
        ]
        parser.error("; ".join(problems))


async def _main(config: VerifierConfig) -> int:
    from cloud_verifier.verifier import Verifier  # needs the extra; `main` says so where it is missing

    traces.configure("verifier")

    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, lambda: (at_once if stop.is_set() else stop).set())  # the second is in a hurry
    return await Verifier(config).run(stop, at_once)


def main(arguments: Sequence[str] | None = None) -> None:
    config = parse(arguments)
    give_back_what_is_freed()
    configure(config.log_format, "verifier")
    try:
        raise SystemExit(asyncio.run(_main(config)))
    except OutriderError as error:
        print(f"outrider-verifier: {error}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from error
    except ImportError as error:
        print(f"outrider-verifier: {error}; {INSTALL}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from error


if __name__ == "__main__":
    main()
