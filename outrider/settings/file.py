"""Read the configuration file: TOML with a table for each process, named by a flag or a variable and never searched."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings

from outrider.core.errors import BadRequest

VARIABLE = "OUTRIDER_CONFIG"
"""The variable that names the file if no `--config` does."""
TABLES = ("coordinator", "verifier", "edge", "distill")
MAX_BYTES = 1 << 20
"""Bytes of a file; one that sets everything has a few thousand."""


def config_file(flag: Path | None = None) -> Path | None:
    """Return the file to read: that of a flag, else that of the environment, else None."""
    given = os.environ.get(VARIABLE)
    return flag or (Path(given) if given else None)


def prefix_of(cls: type[BaseSettings]) -> str:
    """Return what the variables of a settings model begin with: OUTRIDER_<TABLE>_."""
    return cls.model_config.get("env_prefix", "")


def table_of(cls: type[BaseSettings]) -> str:
    """Return the name of the table that a process reads."""
    return prefix_of(cls).removeprefix("OUTRIDER_").removesuffix("_").lower()


def read(path: Path) -> dict[str, Any]:
    """Return all tables of a file. Raises BadRequest that names the file if it cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadRequest(f"{path} is no regular file; give a TOML file", field="config")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", field="config") from error
    if len(data) > MAX_BYTES:
        raise BadRequest(f"{path} has more than {MAX_BYTES} bytes, too many for a configuration file", field="config")
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise BadRequest(f"{path} is not UTF-8: got {got}; save it as UTF-8", field="config") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadRequest(f"{path} is no TOML: {why}", field="config") from error
