"""Generate the protobuf stubs from `proto/`, or with `--check` fail if the committed ones are stale."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "proto").rglob("*.proto"))


def generate(into: Path) -> list[Path]:
    """Write the stubs below `into` and return their paths relative to it."""
    arguments = [
        "protoc",
        f"--proto_path={ROOT / 'proto'}",
        f"--python_out={into}",
        f"--pyi_out={into}",
        f"--grpc_python_out={into}",
        *map(str, SOURCES),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed: see its message above")
    return sorted(path.relative_to(into) for path in into.rglob("*_pb2*.py*") if "__pycache__" not in path.parts)


def stale() -> list[Path]:
    """Return the committed stubs that differ from what the `.proto` files give."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
        texts = {path: (Path(scratch) / path).read_bytes() for path in fresh}
    return [path for path, text in texts.items() if not (ROOT / path).exists() or (ROOT / path).read_bytes() != text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a stub is stale")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    if old := stale():
        print("stale stubs, run `make proto`:", *old, sep="\n  ", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
