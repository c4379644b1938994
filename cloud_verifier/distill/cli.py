"""`outrider-distill`: drafts that learn from recorded traffic, trained, judged and published."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from cloud_verifier.distill.config import INSTALL, DistillConfig
from cloud_verifier.distill.publishing import keys
from outrider.console_scripts import EndedByInterrupt
from outrider.core.errors import BadRequest, OutriderError
from outrider.settings.options import add_config_options, add_settings, epilog, layers_of, settle
from outrider.telemetry.logs import LogFormat, configure
from outrider.telemetry.prometheus import registry

PROGRAM = "outrider-distill"
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
"""The gate or the canary refused the draft."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    configure(_log_format(options), "distill")
    try:
        raise SystemExit(options.run(options))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except ImportError as error:
        print(f"{PROGRAM}: {error}; {INSTALL}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from error
    except OutriderError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE if isinstance(error, BadRequest) else EXIT_FAILED) from error


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        epilog="The settings of `run`, `once`, `status` and `publish`: outrider-distill run --help",
    )
    verbs = made.add_subparsers(required=True, metavar="VERB")

    _add_loop(verbs)
    _add_stages(verbs)
    _add_publishing(verbs)
    return made


def _add_loop(verbs: Any) -> None:
    run = verbs.add_parser("run", help="the loop, until SIGTERM or Ctrl-C")
    run.set_defaults(run=lambda options: _run_loop(_config(options)))
    once = verbs.add_parser(
        "once",
        help="one turn of the loop, for cron",
        epilog="Exit status: 0 published or nothing to do, 1 failed, 2 wrong settings, 3 the draft was refused.",
    )
    once.set_defaults(run=lambda options: asyncio.run(_once(_config(options))))
    status = verbs.add_parser("status", help="where the loop is, what came of its runs, and the releases")
    status.set_defaults(run=lambda options: asyncio.run(_status(_config(options))))
    for verb in (run, once, status):
        _add_settings(verb, DistillConfig.model_fields.keys())


def _add_stages(verbs: Any) -> None:
    """What the loop does, one by one."""
    train = verbs.add_parser("train", help="train in a run's folder, by its plan.json; goes on where it stopped")
    train.add_argument("folder", type=Path, metavar="RUN_DIR", help="folder of the run, which holds its plan.json")
    train.set_defaults(run=_train)

    export = verbs.add_parser("export", help="a Hugging Face draft as a quantised GGUF file, checked")
    export.add_argument("--model", type=Path, required=True, help="folder of the draft")
    export.add_argument("--tokenizer", type=Path, required=True, help="folder of the target")
    export.add_argument("--out", type=Path, required=True, help="GGUF file to write")
    export.add_argument(
        "--kind", default="Q8_0", help="quantisation: F32, F16, Q8_0, Q6_K, Q4_K_M or Q4_0 [default: Q8_0]"
    )
    export.add_argument(
        "--widen",
        action="append",
        default=[],
        metavar="PATTERN",
        help="tensors that may be stored wider [default: none]",
    )
    export.set_defaults(run=_export)

    gate = verbs.add_parser("gate", help="measure a draft against another on held-out text, and judge it")
    gate.add_argument("--candidate", type=Path, required=True, help="GGUF file")
    gate.add_argument("--incumbent", type=Path, required=True, help="GGUF file that it must beat")
    gate.add_argument("--dataset", type=Path, required=True, help="folder that a dataset was built in")
    gate.add_argument(
        "--fresh",
        action="append",
        metavar="CLASS",
        help="traffic class; the draft must win on those given together [default: all]",
    )
    gate.add_argument("--threads", type=int, default=1, help="CPU threads [default: 1]")
    gate.set_defaults(run=_gate)


def _add_publishing(verbs: Any) -> None:
    publish = verbs.add_parser("publish", help="sign a draft and publish it as the newest release")
    publish.add_argument("file", type=Path, metavar="FILE", help="GGUF file")
    publish.add_argument(
        "--quantization", default="Q8_0", help="of the file, to be told in the manifest [default: Q8_0]"
    )
    publish.add_argument(
        "--parent", default="", metavar="HASH", help="hex digest of the draft that it came from [default: none]"
    )
    publish.add_argument(
        "--verdict",
        type=Path,
        metavar="JSON",
        help="file of what `gate` printed, for the manifest's metrics [default: none]",
    )
    publish.set_defaults(run=lambda options: asyncio.run(_publish(_config(options), options)))
    # It says by an option of its own how its file is quantised.
    _add_settings(publish, DistillConfig.model_fields.keys() - {"quantization"}, " FILE")

    key = verbs.add_parser("key", help="make a publisher's key, or show the public half of the one there is")
    key.add_argument(
        "--file", type=Path, help="PEM file of the key [default: the setting `key`] [env: OUTRIDER_DISTILL_KEY]"
    )
    key.set_defaults(run=_key)
    add_config_options(key, DistillConfig, check=False)


def _add_settings(verb: argparse.ArgumentParser, names: Collection[str], operands: str = "") -> None:
    verb.epilog = " ".join(filter(None, (verb.epilog, epilog(DistillConfig))))
    verb.usage = f"%(prog)s [OPTION ...]{operands}"
    add_config_options(verb, DistillConfig)
    add_settings(verb, DistillConfig, names)


def _config(options: argparse.Namespace) -> DistillConfig:
    """Raises BadRequest without the values of secrets."""
    return settle(DistillConfig, options, PROGRAM)


def _log_format(options: argparse.Namespace) -> LogFormat:
    """Settings that are wrong are told by the command itself; one without settings prints what it says."""
    with contextlib.suppress(BadRequest):
        if hasattr(options, "config") and layers_of(DistillConfig, options).raw("log_format") == "json":
            return "json"
    return "text"


def _run_loop(config: DistillConfig) -> int:
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_run(config))
    return 0


async def _run(config: DistillConfig) -> None:
    async with _loop(config) as loop, _watched(loop, config):
        work = asyncio.create_task(loop.run())
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, work.cancel)
        await work


@contextlib.asynccontextmanager
async def _watched(loop: Any, config: DistillConfig) -> AsyncIterator[None]:
    """Metrics are served, where they are asked for. Raises Unavailable for a taken address."""
    if not config.metrics:
        yield
        return
    from cloud_verifier.distill.metrics import DistillCollector
    from outrider.telemetry.metrics_server import serving  # needs starlette and uvicorn

    async with serving(config.metrics, registry(DistillCollector(loop, config)), lambda: ""):
        yield


async def _once(config: DistillConfig) -> int:
    from cloud_verifier.distill.stage_processes import StageFailed

    async with _loop(config) as loop:
        try:
            outcome = await loop.once()
        except StageFailed as error:
            print(f"{PROGRAM}: {error}", file=sys.stderr)
            return EXIT_FAILED
        print(loop.where if outcome is None else f"run {outcome.number}: {outcome.result} {outcome.reason}".rstrip())
    return 0 if outcome is None or outcome.result in ("stable", "waiting") else EXIT_REFUSED


@contextlib.asynccontextmanager
async def _loop(config: DistillConfig) -> AsyncIterator[Any]:
    with EndedByInterrupt():
        import cloud_verifier.engine.model  # noqa: F401  # the factory needs its hash of the target; it imports torch
        from cloud_verifier.distill.factory import assembled

    async with assembled(config) as loop:
        yield loop


async def _status(config: DistillConfig) -> int:
    from cloud_verifier.distill.factory import coordinator
    from cloud_verifier.distill.state import StateFile

    state = StateFile(config.state).load()
    run = state.run
    print(f"run {run.number}, {run.stage}: {run.cause}" if run else f"watching, {state.last} runs so far")
    for outcome in state.history:
        print(f"  run {outcome.number}: {outcome.result} {outcome.release[:12]} ({outcome.cause}) {outcome.reason}")
    async with coordinator(config) as releases:
        for known in await releases.list():
            print(f"  release {known.manifest.version} {known.digest[:12]}: {known.state} {known.reason}")
    return 0


async def _publish(config: DistillConfig, options: argparse.Namespace) -> int:
    from cloud_verifier.distill.factory import publishing
    from cloud_verifier.distill.publishing.publisher import Draft

    if not options.file.is_file():
        raise BadRequest(f"{options.file} is not a file; give the GGUF that `export` wrote", field="file")
    metrics = json.loads(options.verdict.read_bytes())["metrics"] if options.verdict else {}
    async with publishing(config) as publisher:
        known = await publisher.publish(Draft(options.file, options.quantization, options.parent, metrics))
    print(f"release {known.manifest.version}, {known.digest}: {known.state}")
    return 0


def _train(options: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "cloud_verifier.distill.training.run", str(options.folder)]
    os.execv(sys.executable, command)


def _export(options: argparse.Namespace) -> int:
    from cloud_verifier.distill.gguf.export import Kind, export
    from cloud_verifier.distill.gguf.exporter import ExportError

    if options.kind not in get_args(Kind):
        raise BadRequest(f"--kind is {options.kind}, must be one of {', '.join(get_args(Kind))}", field="kind")
    try:
        done = export(options.model, options.tokenizer, options.out, options.kind, widened=options.widen)
    except ExportError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(f"{done.path}: {done.size} bytes, {_counted(done.types)}; {done.probes} strings split as by the tokenizer")
    return 0


def _gate(options: argparse.Namespace) -> int:
    from cloud_verifier.distill.data import dataset
    from cloud_verifier.distill.gguf import eval_gguf
    from cloud_verifier.distill.publishing import gate

    texts = dataset.heldout(options.dataset)
    fresh = options.fresh or {text.traffic_class for text in texts}
    measured = eval_gguf.compare(options.candidate, options.incumbent, texts, options.threads)
    verdict = gate.decide(measured, fresh, gate.Rule())
    print(json.dumps(verdict.to_json() | {"metrics": verdict.metrics()}, indent=1))
    return 0 if verdict.passed else EXIT_REFUSED


def _key(options: argparse.Namespace) -> int:
    """The key's file alone is asked for: nothing else needs to be set up yet."""
    path: Path = options.file or Path(layers_of(DistillConfig, options).raw("key"))
    made: Callable[[Path], Any] = keys.load if path.expanduser().exists() else keys.create
    print(made(path).public_key.hex())
    return 0


def _counted(types: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(types.items()))


if __name__ == "__main__":
    main()
