"""The configuration file: TOML, a table for each process. Nobody looks for one; it is named by a flag or a variable."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, TomlConfigSettingsSource

from outrider.core.errors import BadRequest

VARIABLE = "OUTRIDER_CONFIG"
"""Names the file where no `--config` does."""
TABLES = ("coordinator", "verifier", "edge", "distill")
MAX_BYTES = 1 << 20
"""Of a file; one that sets everything has a few thousand."""


def named(flag: Path | None = None) -> Path | None:
    """The file to read, if any: a flag's before the environment's."""
    if flag is not None:
        return flag
    given = os.environ.get(VARIABLE)
    return Path(given) if given else None


def table_of(cls: type[BaseSettings]) -> str:
    """The table that a process reads: what its variables have in front, OUTRIDER_<TABLE>_."""
    return prefix_of(cls).removeprefix("OUTRIDER_").removesuffix("_").lower()


def prefix_of(cls: type[BaseSettings]) -> str:
    return cls.model_config.get("env_prefix", "")


def read(path: Path) -> dict[str, Any]:
    """All tables of a file. Raises BadRequest that names it."""
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


def open_to_others(path: Path) -> bool:
    """Whether everybody on this machine may read it."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


class Table(TomlConfigSettingsSource):
    """A process's own table; empty where the file has none. Raises BadRequest for a file that cannot be read."""

    def __init__(self, cls: type[BaseSettings], path: Path) -> None:
        self.path = path
        self.tables = read(path)
        self.table = table_of(cls)
        super().__init__(cls, path, (self.table,))

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        """What was read already, within bounds; a table that is none is a problem of its own."""
        found = self.tables.get(self.table)
        return {self.table: found if isinstance(found, dict) else {}}
