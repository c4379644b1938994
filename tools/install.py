"""Install Outrider with some of its extras into a virtual environment, and show what takes how long.

    python3 tools/install.py --venv .venv edge verifier coordinator

It needs nothing but the standard library, since it runs before anything is installed. llama.cpp is compiled without its
programs and its multimodal library, and the wheel is kept in `~/.cache/outrider/wheels` for the next clone.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import that Ctrl-C breaks off would show a traceback

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
LIBRARY_ONLY = ROOT / "tools" / "llama_cpp_library.cmake"
BUILD_VARIABLES = ("CMAKE_ARGS", "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")
NEEDS_LLAMA = {"edge", "distill", "all", "dev"}
"""Extras that install llama-cpp-python."""

HEARTBEAT_S = 15.0
"""The longest silence on the terminal."""
LOG_LINES = 40
"""Lines of a failed command's output that are shown."""

_NINJA = re.compile(r"^\s*\[(\d+)/(\d+)\]")
_MAKE = re.compile(r"^\s*\[ *(\d+)%\]")
_PIP = re.compile(r"^\s*(Collecting|Downloading|Building|Installing collected packages)\b[: ]*(\S*)")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Install Outrider into a virtual environment.")
    parser.add_argument("extras", nargs="+", metavar="EXTRA", help="extras of pyproject.toml, such as edge or dev")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment's folder [default: .venv]")
    parser.add_argument("--wheel", type=Path, help="install this file of Outrider, not the sources")
    options = parser.parse_args(arguments)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    python = options.venv / "bin" / "python"
    try:
        if not python.exists():
            run("create a virtual environment (5 s)", [sys.executable, "-m", "venv", str(options.venv)])
        wheels = llama_wheel(python) if NEEDS_LLAMA & set(options.extras) else None
        extras = ",".join(options.extras)
        what = [f"{options.wheel}[{extras}]"] if options.wheel else ["-e", f"{ROOT}[{extras}]"]
        # Python compiles what it imports, a small part of torch and transformers, which take a minute as a whole.
        install = [*pip(python, "install"), "--no-compile", "-c", str(CONSTRAINTS), *what]
        if wheels is not None:
            install += ["--find-links", str(wheels)]
        run("install the Python packages (1 to 5 minutes, mostly torch)", install, activity=pip_activity)
    except subprocess.CalledProcessError as error:
        print(f"{shlex.join(error.cmd)} failed with exit code {error.returncode}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def pip(python: Path, verb: str) -> list[str]:
    """Return the beginning of a pip command line."""
    return [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", verb]


# --- llama.cpp


def llama_wheel(python: Path) -> Path:
    """Return the folder with a wheel of llama-cpp-python for this machine, which is built unless it is there."""
    requirement = pinned("llama_cpp_python")
    folder = cache_folder(os.environ) / build_key(requirement, cpu_features(), compilers(os.environ), os.environ)
    if any(folder.glob("llama_cpp_python-*.whl")):
        print(f"- llama.cpp: found in {folder}", flush=True)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        # Not ":all:", which would build CMake and Ninja themselves from their sources on a machine without them.
        source = ["--no-binary", "llama-cpp-python"]
        command = [*pip(python, "wheel"), "-v", "--no-deps", "--no-cache-dir", *source, "-w", scratch, requirement]
        run("compile llama.cpp (2 to 5 minutes, once)", command, build_environment(os.environ), compile_activity)
        folder.mkdir(exist_ok=True)
        for wheel in Path(scratch).glob("*.whl"):
            os.replace(wheel, folder / wheel.name)
    return folder


def pinned(name: str) -> str:
    """Return the requirement `name==version` of the constraints file. Raises LookupError if there is none."""
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        if line.partition("==")[0].strip().replace("-", "_").lower() == name:
            return line.strip()
    raise LookupError(f"{CONSTRAINTS} has no line {name}==VERSION")


def cmake_arguments(environment: Mapping[str, str]) -> str:
    """Return the CMake arguments of the build: the library alone, then what the user asks for in CMAKE_ARGS."""
    ours = ["-DLLAVA_BUILD=OFF", f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={LIBRARY_ONLY}"]
    return " ".join([*map(shlex.quote, ours), environment.get("CMAKE_ARGS", "")]).strip()


def build_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the build, which uses all cores, with make, too, unless the user says otherwise."""
    cores = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
    return {**cores, **environment, "CMAKE_ARGS": cmake_arguments(environment)}


def build_key(requirement: str, features: str, compiled_by: str, environment: Mapping[str, str]) -> str:
    """Name a build by everything that its machine code depends on: a library built for one CPU may crash on another."""
    parts = [
        requirement,
        platform.machine(),
        features,
        compiled_by,
        *(environment.get(name, "") for name in BUILD_VARIABLES),
        LIBRARY_ONLY.read_text(encoding="utf-8"),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cache_folder(environment: Mapping[str, str]) -> Path:
    home = environment.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home) / "outrider" / "wheels"


def cpu_features() -> str:
    """Return the instruction sets of this CPU, which llama.cpp compiles for."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return " ".join(sorted(found.group(1).split())) if found else platform.processor()


def compilers(environment: Mapping[str, str]) -> str:
    """Return the first line of the version of the C and of the C++ compiler, empty for one that is not found."""
    lines = []
    for command in (environment.get("CC") or "cc", environment.get("CXX") or "c++"):
        words = [*shlex.split(command), "--version"]  # it may be "ccache g++"
        found = shutil.which(words[0])
        answer = subprocess.run(words, capture_output=True, text=True, check=False).stdout if found else ""
        lines.append(answer.partition("\n")[0])
    return "\n".join(lines)


# --- what the terminal shows

Activity = Callable[[str], str | None]
"""Takes a line of a command's output; returns what to show of it, None for nothing new."""


def compile_activity(line: str) -> str | None:
    if found := _NINJA.match(line):
        return f"{found.group(1)} of {found.group(2)} files compiled"
    if found := _MAKE.match(line):
        return f"{found.group(1)}% compiled"
    return None


def pip_activity(line: str) -> str | None:
    found = _PIP.match(line)
    if found is None:
        return None
    verb, name = found.groups()
    if verb.startswith("Installing"):
        return "unpacking all packages"
    return f"{verb.lower()} {name.rpartition('/')[2]}"


def run(
    what: str,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    activity: Activity = lambda line: None,
) -> None:
    """Run a command while a line says at least every HEARTBEAT_S seconds how far it is.

    Raises CalledProcessError if it fails, after the end of its output was shown.
    """
    print(f"- {what}", flush=True)
    begun, doing, output = time.monotonic(), "", []
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_S):
            print(f"    {minutes(time.monotonic() - begun)} {doing}".rstrip(), flush=True)

    teller = threading.Thread(target=beat, daemon=True)
    teller.start()
    try:
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            for line in process.stdout or ():
                output.append(line)
                doing = activity(line) or doing
    finally:
        ended.set()
        teller.join()
    if process.returncode:
        sys.stderr.writelines(output[-LOG_LINES:])
        raise subprocess.CalledProcessError(process.returncode, list(command))
    print(f"    done in {minutes(time.monotonic() - begun)}", flush=True)


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


if __name__ == "__main__":
    sys.exit(main())
