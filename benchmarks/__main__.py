"""List the benchmarks, run several of them one after another, or write their page.

    python -m benchmarks                      list all
    python -m benchmarks all --quick          run all, for at most two minutes each
    python -m benchmarks all                  run all in full, in about two hours
    python -m benchmarks latency capacity     run some
    python -m benchmarks page                 write docs/benchmarks.md from benchmarks/results

Results of full runs go to benchmarks/results, those of quick runs to benchmarks/out, which git ignores. The exit status
is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import ast
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.page import draw_speedups, page

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"
PICTURE = ROOT / "docs" / "images" / "speedup.svg"
RESULTS, OUT = FOLDER / "results", FOLDER / "out"
NAMES = (
    *("lossless", "latency", "window", "capacity", "engine"),
    *("failover", "control_plane", "overload", "constrained", "distill"),
)
PASSED_ON = ("--models", "--draft", "--prompts")
LIMIT_S = 7_200
"""Seconds after which a run is stopped, because it hangs."""


def docstring(name: str) -> str:
    """Return the docstring of a benchmark's program, without importing what it imports."""
    file = FOLDER / f"{name}.py"
    text = (file if file.is_file() else FOLDER / name / "__main__.py").read_text()
    return ast.get_docstring(ast.parse(text)) or ""


def run(name: str, arguments: Sequence[str], out: Path) -> bool:
    """Run one benchmark, and return whether it succeeded; its progress goes to this terminal."""
    began = time.monotonic()
    print(f"{name}: running", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--out", str(out / f"{name}.json")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        status = -1
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it ends the processes that it has started
            process.wait()
    print(f"{name}: {'ok' if status == 0 else 'FAILED'}, {time.monotonic() - began:,.0f} s", flush=True)
    return status == 0


def write_page() -> None:
    """Write docs/benchmarks.md and README's picture."""
    results = {name: RESULTS / f"{name}.json" for name in NAMES}
    found = {name: json.loads(file.read_text()) for name, file in results.items() if file.is_file()}
    (ROOT / "docs" / "benchmarks.md").write_text(page({name: docstring(name) for name in NAMES}, found))
    if "window" in found:
        draw_speedups(found["window"], PICTURE)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="`all`, some by name, or `page`; none to list them")
    parser.add_argument("--quick", action="store_true", help="run each for at most two minutes")
    for name in PASSED_ON:
        parser.add_argument(name, help=f"see `python -m benchmarks.{NAMES[0]} --help`")
    options = parser.parse_args(argv)
    if not options.names:
        for name in NAMES:
            print(f"{name:14} {docstring(name).splitlines()[0]}")
        return 0
    if options.names == ["page"]:
        write_page()
        return 0
    if unknown := {*options.names} - {"all", *NAMES}:
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}; `python -m benchmarks` lists them")
    given = ["--quick"] if options.quick else []
    for name in PASSED_ON:
        if value := getattr(options, name.removeprefix("--")):
            given += [name, str(Path(value).absolute()) if Path(value).exists() else value]
    chosen = [name for name in NAMES if {"all", name} & {*options.names}]
    succeeded = [run(name, given, OUT if options.quick else RESULTS) for name in chosen]
    return 0 if all(succeeded) else 1


if __name__ == "__main__":
    sys.exit(main())
