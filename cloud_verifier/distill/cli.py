"""Train drafts on recorded traffic, judge and publish them with `outrider-distill`. Its help imports nothing heavy."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from cloud_verifier.distill.config import INSTALL, DistillConfig, Embeddings, Quantization
from cloud_verifier.distill.run_folder import DATASET, RunFolder, StageFailed, all_runs
from outrider.artifacts.hub import fetch_draft, fetch_target
from outrider.console_scripts import INTERRUPTED, EndedByInterrupt
from outrider.core.errors import BadRequest, OutriderError
from outrider.core.text import Parser
from outrider.settings import add_config_options, add_settings, epilog, layers_of, settle
from outrider.telemetry.logs import configure

if TYPE_CHECKING:
    from cloud_verifier.distill.loop import DistillLoop

PROGRAM = "outrider-distill"
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
"""The gate or the canary refused the draft."""
NICE = 10
"""Niceness added to the loop, so that verifiers on the same machine come first."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        raise SystemExit(options.run(options))
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except ImportError as error:
        print(f"{PROGRAM}: {error}; {INSTALL}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from error
    except (OutriderError, StageFailed) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE if isinstance(error, BadRequest) else EXIT_FAILED) from error


def parser() -> argparse.ArgumentParser:
    """Return the parser, whose namespaces have in `run` the function of their command."""
    made = Parser(
        prog=PROGRAM,
        description="Train drafts on recorded traffic, judge them and publish them.",
        epilog="The settings of `run`, `once`, `status` and `publish`: outrider-distill run --help",
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    _add_loop(commands)
    _add_stages(commands)
    _add_publishing(commands)
    return made


def _add_loop(commands: Any) -> None:
    run = commands.add_parser("run", help="run the loop until SIGTERM or Ctrl-C")
    run.set_defaults(run=lambda options: asyncio.run(_run(_fetched(_config(options)))))
    once = commands.add_parser(
        "once",
        help="do one turn of the loop, for cron",
        epilog="Exit status: 0 published or nothing to do, 1 failed, 2 wrong settings, 3 the draft was refused.",
    )
    once.set_defaults(run=lambda options: asyncio.run(_once(_fetched(_config(options)))))
    status = commands.add_parser("status", help="show the loop's stage, its past runs, and the releases")
    status.set_defaults(run=lambda options: asyncio.run(_status(_config(options))))
    for command in (run, once, status):
        _add_settings(command)

    forget = commands.add_parser("forget", help="delete what was recorded of a tenant, which has withdrawn its consent")
    forget.add_argument("tenant", metavar="TENANT", help="name of the tenant")
    forget.set_defaults(run=_forget)
    add_config_options(forget, DistillConfig, check=False)
    add_settings(forget, DistillConfig, ("traffic", "state_dir"))


def _add_stages(commands: Any) -> None:
    train = commands.add_parser("train", help="train by the plan.json in a run's folder, from its checkpoint on")
    train.add_argument("folder", type=Path, metavar="RUN_DIR", help="folder of the run, which holds its plan.json")
    train.set_defaults(run=_train)

    export = commands.add_parser("export", help="write a Hugging Face draft as a quantized GGUF file, and check it")
    export.add_argument("--model", type=Path, required=True, help="folder of the draft")
    export.add_argument("--tokenizer", type=Path, required=True, help="folder of the target")
    export.add_argument("--out", type=Path, required=True, help="GGUF file to write")
    text = "storage type of the weights [default: Q8_0]"
    export.add_argument("--quantization", default="Q8_0", choices=get_args(Quantization), help=text)
    text = "storage type of the embeddings [default: llama.cpp's choice, a wide one]"
    export.add_argument("--embeddings", choices=get_args(Embeddings), help=text)
    export.set_defaults(run=_export)

    gate = commands.add_parser("gate", help="measure a draft against another on held-out text, and judge it")
    gate.add_argument("--candidate", type=Path, required=True, help="GGUF file")
    gate.add_argument("--incumbent", type=Path, required=True, help="GGUF file that it must beat")
    gate.add_argument("--dataset", type=Path, required=True, help="folder that a dataset was built in")
    gate.add_argument(
        "--fresh",
        action="append",
        metavar="CLASS",
        help="traffic class; the draft must win on all given ones together [default: all]",
    )
    gate.add_argument("--threads", type=int, default=1, help="CPU threads [default: 1]")
    gate.set_defaults(run=_gate)


def _add_publishing(commands: Any) -> None:
    publish = commands.add_parser("publish", help="sign a draft and publish it as the newest release")
    publish.add_argument("file", type=Path, metavar="FILE", help="GGUF file")
    publish.add_argument("--quantization", default="Q8_0", help="quantization of the file [default: Q8_0]")
    publish.add_argument(
        "--parent", default="", metavar="HASH", help="hex digest of the draft that it was trained from [default: none]"
    )
    publish.add_argument(
        "--verdict", type=Path, metavar="JSON", help="output of `gate`, for the manifest's metrics [default: none]"
    )
    publish.set_defaults(run=lambda options: asyncio.run(_publish(_fetched(_config(options)), options)))
    _add_settings(publish, " FILE")

    key = commands.add_parser("key", help="make a publisher's key, or show the public half of an existing one")
    key.add_argument(
        "--file", type=Path, help="PEM file of the key [default: the setting `key`] [env: OUTRIDER_DISTILL_KEY]"
    )
    key.set_defaults(run=_key)
    add_config_options(key, DistillConfig, check=False)


def _add_settings(command: argparse.ArgumentParser, operands: str = "") -> None:
    command.epilog = " ".join(filter(None, (command.epilog, epilog(DistillConfig))))
    command.usage = f"%(prog)s [OPTION ...]{operands}"
    add_config_options(command, DistillConfig)
    add_settings(command, DistillConfig)


def _config(options: argparse.Namespace) -> DistillConfig:
    """Return the settings, and begin to log. Raises BadRequest, without the values of secrets."""
    configure("distill")
    return settle(DistillConfig, options, PROGRAM)


def _fetched(config: DistillConfig) -> DistillConfig:
    """Return the settings with paths for ids of the hub. Raises ModelRefused, Unavailable, or ImportError."""
    target = fetch_target(config.target, "--target")
    if config.heads:
        draft = target if config.draft.suffix != ".safetensors" else config.draft
    else:
        draft = fetch_draft(config.draft)
    return config.model_copy(update={"draft": draft, "target": target})


async def _run(config: DistillConfig) -> int:
    async with contextlib.AsyncExitStack() as stack:
        loop = await stack.enter_async_context(_loop(config))
        if config.metrics:
            from cloud_verifier.distill.metrics import DistillCollector
            from outrider.telemetry.metrics_server import serving
            from outrider.telemetry.prometheus import registry

            collector = DistillCollector(loop)
            await stack.enter_async_context(serving(config.metrics, registry(collector), lambda: ""))
        task = asyncio.create_task(loop.run_forever())
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return 0


async def _once(config: DistillConfig) -> int:
    async with _loop(config) as loop:
        from cloud_verifier.distill.loop import described

        ended = await loop.once()
    outcome = ended.outcome if ended else None
    if ended is None or outcome is None:
        print(described(config))
        return 0
    print(f"run {ended.number}: {outcome.result} {outcome.reason}".rstrip())
    if outcome.result == "failed":
        return EXIT_FAILED
    return 0 if outcome.result in ("stable", "waiting") else EXIT_REFUSED


def _loop(config: DistillConfig) -> contextlib.AbstractAsyncContextManager[DistillLoop]:
    _be_quiet()
    with EndedByInterrupt():
        from cloud_verifier.distill.loop import distill_loop
    return distill_loop(config)


def _be_quiet() -> None:
    """Leave the machine's cores to others. Called before torch is imported."""
    os.nice(NICE)
    # A thread that spins waits long for one that lost its core to another process: beside other load on two cores a
    # step of 1.2 s took 6 to 12 s with spinning, and 1.3 to 5 s without.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


async def _status(config: DistillConfig) -> int:
    from cloud_verifier.distill.loop import described
    from cloud_verifier.distill.publisher import ReleaseClient
    from outrider.wire.manifest import state_of

    print(described(config))
    for run in all_runs(config.runs):
        if outcome := run.outcome:
            print(f"  run {run.number}: {outcome.result} {run.release[:12]} {outcome.reason}".rstrip())
    if not config.heads:
        async with ReleaseClient(config) as registry:
            for release in await registry.list():
                print(f"  release {release.version} {release.name[:12]}: {state_of(release)} {release.reason}")
    return 0


async def _publish(config: DistillConfig, options: argparse.Namespace) -> int:
    from cloud_verifier.distill.loop import publishing, target_hashes
    from cloud_verifier.distill.publisher import serve_heads
    from outrider.wire.manifest import state_of

    if not options.file.is_file():
        raise BadRequest(f"{options.file} is not a file; give the GGUF that `export` wrote", field="file")
    metrics = json.loads(options.verdict.read_bytes())["metrics"] if options.verdict else {}
    hashes = await asyncio.to_thread(target_hashes, config.target)
    async with publishing(config, hashes) as publisher:
        if publisher is None:
            print(f"heads {serve_heads(options.file, config.artifacts, hashes.weights_hash)} are served")
            return 0
        release = await publisher.publish(options.file, options.quantization, options.parent, metrics)
    print(f"release {release.version}, {release.name}: {state_of(release)}")
    return 0


def _forget(options: argparse.Namespace) -> int:
    from cloud_verifier.traffic.log import TrafficLog

    layers = layers_of(DistillConfig, options)  # the two settings alone: a verifier's machine has no others
    traffic = layers.raw("traffic")
    if not traffic:
        raise BadRequest("traffic is required: give --traffic", field="traffic")
    changed = TrafficLog(traffic).forget(options.tenant)
    for dataset in Path(layers.raw("state_dir")).expanduser().glob(f"runs/*/{DATASET}"):
        RunFolder(dataset.parent).delete_dataset()  # a run that needs it builds it again
    print(f"{traffic}: {changed} files had records of {options.tenant}")
    return 0


def _train(options: argparse.Namespace) -> int:
    configure("distill")
    _be_quiet()
    from cloud_verifier.distill.training.trainer import train
    from outrider.processes import signals_held

    with signals_held() as received:
        return 0 if train(options.folder, lambda: bool(received)) else 128 + received[0]


def _export(options: argparse.Namespace) -> int:
    from cloud_verifier.distill.gguf_files import export

    print(export(options.model, options.tokenizer, options.out, options.quantization, embeddings=options.embeddings))
    return 0


def _gate(options: argparse.Namespace) -> int:
    from cloud_verifier.distill import evaluation, gate
    from cloud_verifier.distill.config import GateRule
    from cloud_verifier.distill.texts import HELDOUT, load_texts

    try:
        texts = load_texts(options.dataset / HELDOUT)
    except ValueError as error:
        raise BadRequest(f"--dataset {options.dataset}: {error}", field="dataset") from error
    fresh = options.fresh or {text.traffic_class for text in texts}
    comparison = evaluation.compare(options.candidate, options.incumbent, texts, options.threads)
    verdict = gate.decide(comparison, fresh, GateRule())
    print(json.dumps(verdict.to_json(), indent=1))
    return 0 if verdict.passed else EXIT_REFUSED


def _key(options: argparse.Namespace) -> int:
    from cloud_verifier.distill.publisher import create_key
    from outrider.wire.ticket import Signer

    # Reads the one setting alone: no other needs to be set yet.
    path: Path = options.file or Path(layers_of(DistillConfig, options).raw("key"))
    signer = Signer.load(path) if path.expanduser().exists() else create_key(path)
    print(signer.public_key.hex())
    return 0


if __name__ == "__main__":
    main()
