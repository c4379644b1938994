"""Put the sources of one process's settings on top of one another, by pydantic-settings, and keep which gave what.

The file is TOML with a table for each process. A flag or a variable names it; it is never searched for.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource

from outrider.core.addresses import split_address
from outrider.core.errors import BadRequest
from outrider.settings.problems import SettingProblem, WrongSettings, got, is_secret, near, printable

S = TypeVar("S", bound=BaseSettings)
SettingSource = Literal["flag", "environment", "file", "default"]
VARIABLE = "OUTRIDER_CONFIG"
"""The variable that names the file if no `--config` does."""
TABLES = ("coordinator", "verifier", "edge", "distill")
MAX_BYTES = 1 << 20
"""Bytes of a file; one that sets everything has a few thousand."""
ALTERNATIVES = "ALTERNATIVES"
"""The class variable of a settings model that names settings of which only one can take effect."""
_ANYTHING = "."
"""The value of a required setting that is missing, so that the others can be checked against one another."""
_OF_A_SERVICE = re.compile(r"SERVICE_(HOST|PORT)|PORT(_\d+_(TCP|UDP))?|SERVICE_PORT_.*|PORT_\d+_(TCP|UDP)_.*")
"""The variables that Kubernetes adds for a service of our name."""


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


def _address(given: str) -> str:
    """Return an address as it was given; an empty one is none. Raises ValueError."""
    try:
        if given:
            split_address(given)
    except BadRequest:
        raise ValueError("must be HOST:PORT or [V6]:PORT, as 127.0.0.1:7700") from None
    return given


Address = Annotated[str, AfterValidator(_address)]
"""The type of a setting that is an address, or empty."""


class Flag(str):
    """The flag of a setting, in its annotation, if it is not `--` and the setting's name."""


class Repeated(Flag):
    """A flag that may be given several times, for a setting with commas in it."""


def flag_of(cls: type[BaseSettings], name: str) -> str:
    """Return the flag of a setting; "" for a secret, which has none since lists of processes would show it."""
    field = cls.model_fields[name]
    if is_secret(field):
        return ""
    return next((str(mark) for mark in field.metadata if isinstance(mark, Flag)), f"--{name.replace('_', '-')}")


def variable_of(cls: type[BaseSettings], name: str) -> str:
    """Return the environment variable of a setting."""
    return f"{prefix_of(cls)}{name}".upper()


class Layers(Generic[S]):
    """The sources from which the settings of `cls` come.

    flags: values by the settings' names. file: read at once. Raises BadRequest for a file that cannot be read.
    """

    def __init__(self, cls: type[S], flags: Mapping[str, Any] | None = None, file: Path | None = None) -> None:
        self.cls = cls
        self.file = file
        self._tables = read_file(file) if file is not None else {}
        table = self._tables.get(table_of(cls))
        self._given: dict[SettingSource, dict[str, Any]] = {
            "flag": dict(flags or {}),
            "environment": _Environment(cls)(),
            "file": dict(table) if isinstance(table, dict) else {},
        }
        self._choose(getattr(cls, ALTERNATIVES, ()))

    def source(self, name: str) -> SettingSource:
        """Return the first source that has a setting."""
        return next((source for source, values in self._given.items() if name in values), "default")

    def raw(self, name: str) -> Any:
        """Return a setting as it was given, or its default; None if it is required and missing."""
        for values in self._given.values():
            if name in values:
                return values[name]
        field = self.cls.model_fields[name]
        return None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})

    def load(self) -> S:
        """Return the settings. Raises WrongSettings with all that is wrong."""
        config, problems = self.attempt()
        if config is None or problems:
            raise WrongSettings(problems)
        return config

    def attempt(self) -> tuple[S | None, list[SettingProblem]]:
        """Return the settings, or None, and all that is wrong with them and with the file's tables."""
        config, problems = self._build({})
        missing = {problem.name: _ANYTHING for problem in problems if problem.missing}
        if missing and len(missing) == len(problems):
            problems = [*problems, *self._build(missing)[1]]
        return config, [*self._unknown_tables(), *problems]

    def warnings(self) -> Iterator[str]:
        """Yield what is no error and hardly meant."""
        fields = self.cls.model_fields
        for name, variable in variables(prefix_of(self.cls)).items():
            if name not in fields:
                hint = near(name, fields, lambda found: variable_of(self.cls, found))
                yield f"{printable(variable)} is set, and there is no such setting{hint}"
        secrets = [name for name, field in fields.items() if is_secret(field) and self._given["file"].get(name)]
        if secrets and self.file is not None and _readable_by_all(self.file):
            yield (
                f"{self.file} holds {', '.join(secrets)} and everybody on this machine can read it: chmod o-r "
                f"{self.file}, or set {', '.join(variable_of(self.cls, name) for name in secrets)} in the environment"
            )

    def _choose(self, alternatives: Collection[str]) -> None:
        """Drop the other alternatives from the sources below the first that names one of them."""
        chosen = False
        for values in self._given.values():
            if chosen:
                for name in alternatives:
                    values.pop(name, None)
            chosen = chosen or any(values.get(name) for name in alternatives)

    def _build(self, more: Mapping[str, Any]) -> tuple[S | None, list[SettingProblem]]:
        sources = tuple(InitSettingsSource(self.cls, dict(values)) for values in (*self._given.values(), more))
        try:
            return self.cls(_build_sources=(sources, {})), []
        except ValidationError as error:
            return None, [self._problem(details) for details in error.errors(include_url=False)]

    def _problem(self, error: ErrorDetails) -> SettingProblem:
        """Name the setting as its source calls it, with the value that was got unless it is a secret."""
        table = table_of(self.cls)
        if not error["loc"]:
            return SettingProblem(table, error["msg"].removeprefix("Value error, "))
        name, *rest = map(str, error["loc"])
        in_table = f"{self.file}: [{table}]" if self.file is not None else table
        if error["type"] == "extra_forbidden":
            what = f"no such setting{near(name, self.cls.model_fields)}"
            return SettingProblem(f"{in_table} {printable(name)}", what)
        flag, variable = flag_of(self.cls, name), variable_of(self.cls, name)
        if error["type"] == "missing" and not rest:
            ways = f"{flag}, {variable}" if flag else variable
            what = f"{error['msg']}; give it as {ways} or in [{table}] of a --config file"
            return SettingProblem(name, what, name, missing=True)
        names = {"flag": flag, "environment": variable, "file": f"{in_table} {name}"}
        secret = is_secret(self.cls.model_fields[name])
        what = error["msg"].removeprefix("Value error, ")
        what += "" if secret else f", got {got(error['input'])}"
        where = ".".join([names.get(self.source(name)) or name, *map(printable, rest)])
        return SettingProblem(where, what, name)

    def _unknown_tables(self) -> Iterator[SettingProblem]:
        for name, value in self._tables.items():
            where = f"{self.file}: [{printable(name)}]"
            if name not in TABLES:
                what = f"no such table{near(name, TABLES)}; tables are {', '.join(TABLES)}"
                yield SettingProblem(where, what)
            elif not isinstance(value, dict):
                yield SettingProblem(where, f"must be a table of settings, got {got(value)}")


class _Environment(EnvSettingsSource):
    """The environment's variables; one that should be JSON and is not is left to the model to refuse."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return json.loads(value)
        except ValueError:
            return value


def variables(prefix: str) -> dict[str, str]:
    """Return the environment's variables that begin with `prefix`, by the rest of their names in small letters.

    Those that Kubernetes adds are left out.
    """
    names = {variable.upper().removeprefix(prefix): variable for variable in sorted(os.environ)}
    return {
        name.lower(): variable
        for name, variable in names.items()
        if name != variable.upper() and not _OF_A_SERVICE.fullmatch(name)
    }


def from_environment(cls: type[S]) -> S:
    """Return the settings of a process without flags; the file is that of OUTRIDER_CONFIG. Raises BadRequest."""
    return Layers(cls, {}, config_file()).load()


def read_file(path: Path) -> dict[str, Any]:
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


def _readable_by_all(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False
