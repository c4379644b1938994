"""Read the settings of a process with pydantic-settings: flags over environment over TOML file over defaults.

The file has a table for each process. A flag or a variable names it; it is never searched for. Flags are argparse's:
the help of each is the setting's own text, with its default and its variable.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource

from outrider.core.addresses import split_address
from outrider.core.errors import BadRequest
from outrider.core.text import Parser, clean, masked

S = TypeVar("S", bound=BaseSettings)
VARIABLE = "OUTRIDER_CONFIG"
"""The variable that names the file if no `--config` does."""
TABLES = ("coordinator", "verifier", "edge", "distill")
MAX_SHOWN = 80
"""Characters of a wrong value that are repeated."""
ALTERNATIVES = "ALTERNATIVES"
"""The class variable of a settings model that names settings of which only one can take effect."""
_ANYTHING = "."
"""The value of a required setting that is missing, so that the others can be checked against one another."""
_DEST = "setting:"
"""The prefix of settings in a namespace, which holds other options of the same names."""
_UNITS = {"_ms": "MS", "_s": "SECONDS", "_days": "DAYS"}
_TYPES = {int: "N", float: "X", Path: "PATH", dict: "JSON", tuple: "JSON"}


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


def _sendable(given: SecretStr) -> SecretStr:
    if not (given.get_secret_value().isascii() and given.get_secret_value().isprintable()):
        raise ValueError("must be printable ASCII, without a line's end")
    return given


Token = Annotated[SecretStr, AfterValidator(_sendable)]
"""The type of a secret that calls carry in their metadata."""


class Flag(str):
    """The flag of a setting, in its annotation, if it is not `--` and the setting's name."""


class Repeated(Flag):
    """A flag that may be given several times, for a setting with commas in it."""


# --- names


def table_of(cls: type[BaseSettings]) -> str:
    """Return the name of the table that a process reads."""
    return variable_of(cls, "").removeprefix("OUTRIDER_").removesuffix("_").lower()


def variable_of(cls: type[BaseSettings], name: str) -> str:
    """Return the environment variable of a setting: OUTRIDER_<TABLE>_<NAME>."""
    return f"{cls.model_config.get('env_prefix', '')}{name}".upper()


def flag_of(cls: type[BaseSettings], name: str) -> str:
    """Return the flag of a setting; "" for a secret, which has none since lists of processes would show it."""
    field = cls.model_fields[name]
    if is_secret(field):
        return ""
    return next((str(mark) for mark in field.metadata if isinstance(mark, Flag)), f"--{name.replace('_', '-')}")


def is_secret(field: FieldInfo) -> bool:
    """Return whether any part of a setting's value is a secret."""
    return _holds_secret(field.annotation)


def _holds_secret(annotation: Any) -> bool:
    return annotation is SecretStr or any(map(_holds_secret, get_args(annotation)))


def default_of(field: FieldInfo) -> str:
    """Return a setting's default as the file would have it, without quotes; the user's home is `~`."""
    if field.is_required():
        return "none, must be given"
    value = field.get_default(call_default_factory=True, validated_data={})
    if is_secret(field) or value is None or value == "":
        return "none"
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, bool | dict | tuple):
        return json.dumps(value)
    return str(value).replace(str(Path.home()), "~")


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the words of which a setting takes one; () if it takes anything else."""
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def metavar_of(name: str, field: FieldInfo) -> str:
    """Return the word that stands for a setting's value in a help text: its unit, or its type."""
    kinds = {get_origin(kind) or kind for kind in (field.annotation, *get_args(field.annotation))}
    unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
    if any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds):
        return "JSON"
    if str in kinds and "HOST:PORT" in (field.description or ""):
        return "HOST:PORT"
    return unit or next((word for kind, word in _TYPES.items() if kind in kinds), "TEXT")


# --- sources


class Layers(Generic[S]):
    """The sources from which the settings of `cls` come.

    flags: values by the settings' names. file: read at once. Raises BadRequest for a file that cannot be read.
    """

    def __init__(self, cls: type[S], flags: Mapping[str, Any] | None = None, file: Path | None = None) -> None:
        self._cls, self._file = cls, file
        self._tables = read_file(file) if file is not None else {}
        table = self._tables.get(table_of(cls))
        self._given = [dict(flags or {}), _Environment(cls)(), dict(table) if isinstance(table, dict) else {}]
        alternatives = getattr(cls, ALTERNATIVES, ())
        first = next((at for at, values in enumerate(self._given) if any(map(values.get, alternatives))), 0)
        for values in self._given[first + 1 :]:
            for name in alternatives:
                values.pop(name, None)

    def raw(self, name: str) -> Any:
        """Return a setting as it was given, or its default; None if it is required and missing."""
        for values in self._given:
            if name in values:
                return values[name]
        field = self._cls.model_fields[name]
        return None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})

    def load(self) -> S:
        """Return the settings. Raises BadRequest with all that is wrong."""
        config, problems, missing = self._attempt()
        if config is None or problems or missing:
            raise _refused([*problems, *map(self._required, missing)])
        return config

    def report(self, check: Callable[[S], object] | None = None) -> dict[str, Any]:
        """Return `settings` without secrets, `problems`, and `missing`, the required settings that no source has.

        check: called with settings that the model accepts; raises BadRequest for what is wrong beyond the model.
        """
        config, problems, missing = self._attempt()
        if config is not None and check is not None and not (problems or missing):
            try:
                check(config)
            except BadRequest as error:
                problems = [f"{table_of(self._cls)}: {error}"]
        values = {} if config is None else config.model_dump(mode="json", exclude=set(missing))
        return {"settings": _masked(values), "problems": problems, "missing": missing}

    def _attempt(self) -> tuple[S | None, list[str], list[str]]:
        """Return the settings, or None, all that is wrong, and the names of required settings that are missing."""
        config, errors = self._build({})
        missing = [str(error["loc"][0]) for error in errors if error["type"] == "missing" and len(error["loc"]) == 1]
        if missing and len(missing) == len(errors):
            config, errors = self._build(dict.fromkeys(missing, _ANYTHING))
        wrong = [error for error in errors if not (error["loc"] and error["loc"][0] in missing)]
        return config, [*self._wrong_tables(), *map(self._problem, wrong)], missing

    def _build(self, more: Mapping[str, Any]) -> tuple[S | None, list[ErrorDetails]]:
        sources = tuple(InitSettingsSource(self._cls, dict(values)) for values in (*self._given, more))
        try:
            return self._cls(_build_sources=(sources, {})), []
        except ValidationError as error:
            return None, error.errors(include_url=False)

    def _problem(self, error: ErrorDetails) -> str:
        """Name the setting as its source calls it, with the value that was got unless it is a secret."""
        said = error["msg"].removeprefix("Value error, ")
        if not error["loc"]:
            return f"{table_of(self._cls)}: {said}"
        name, *rest = map(str, error["loc"])
        in_file = f"{self._file}: [{table_of(self._cls)}] {name}"
        if error["type"] == "extra_forbidden":
            return clean(f"{in_file}: there is no such setting")
        names = (flag_of(self._cls, name), variable_of(self._cls, name), in_file)
        where = next((said for said, values in zip(names, self._given, strict=True) if name in values), name)
        got = "" if is_secret(self._cls.model_fields[name]) else f", got {_shortened(error['input'])}"
        return clean(f"{'.'.join([where, *rest])}: {said}{got}")

    def _required(self, name: str) -> str:
        flag, variable = flag_of(self._cls, name), variable_of(self._cls, name)
        ways = f"{flag}, {variable}" if flag else variable
        return f"{name}: must be given, as {ways} or in [{table_of(self._cls)}] of a --config file"

    def _wrong_tables(self) -> list[str]:
        strange = [name for name in self._tables if name not in TABLES]
        wrong = [name for name in TABLES if not isinstance(self._tables.get(name, {}), dict)]
        return [
            *(clean(f"{self._file}: [{name}]: no such table; tables are {', '.join(TABLES)}") for name in strange),
            *(f"{self._file}: [{name}]: must be a table of settings" for name in wrong),
        ]


class _Environment(EnvSettingsSource):
    """The environment's variables; one that should be JSON and is not is left to the model to refuse."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        return _json_or_text(value)


def config_file(flag: Path | None = None) -> Path | None:
    """Return the file to read: that of a flag, else that of the environment, else None."""
    given = os.environ.get(VARIABLE)
    return flag or (Path(given) if given else None)


def from_environment(cls: type[S]) -> S:
    """Return the settings of a process without flags; the file is that of OUTRIDER_CONFIG. Raises BadRequest."""
    return Layers(cls, {}, config_file()).load()


def read_file(path: Path) -> dict[str, Any]:
    """Return all tables of a file. Raises BadRequest that names the file if it cannot be read."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", field="config") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{path} is no TOML: {error}", field="config") from error


def _refused(problems: list[str]) -> BadRequest:
    several = "\n  ".join([f"{len(problems)} settings are wrong:", *problems])
    return BadRequest(problems[0] if len(problems) == 1 else several)


def _masked(value: Any) -> Any:
    """Return JSON without the credentials of URLs in its texts, at any depth."""
    if isinstance(value, dict):
        return {name: _masked(one) for name, one in value.items()}
    if isinstance(value, list):
        return [*map(_masked, value)]
    return masked(value) if isinstance(value, str) else value


def _json_or_text(given: str) -> Any:
    """Return what a text is as JSON, or the text if it is none, for the model to refuse."""
    with contextlib.suppress(ValueError):
        return json.loads(given)
    return given


def _shortened(value: Any) -> str:
    said = masked(repr(value))
    return said if len(said) <= MAX_SHOWN else f"{said[:MAX_SHOWN]}..."


# --- flags


def parser_of(cls: type[BaseSettings], program: str, text: str) -> Parser:
    """Return the parser of a program whose options are its settings. text: says what the program does."""
    made = Parser(prog=program, usage="%(prog)s [OPTION ...]", description=text, epilog=epilog(cls))
    add_config_options(made, cls)
    add_settings(made, cls)
    return made


def add_settings(parser: Any, cls: type[BaseSettings], names: Collection[str] | None = None) -> None:
    """Add a flag for each of these settings, or for all, to a parser or a group; secrets have none."""
    for name, field in cls.model_fields.items():
        flag = flag_of(cls, name)
        if not flag or (names is not None and name not in names):
            continue
        text = " ".join((field.description or "").split())
        text = f"{text} [default: {default_of(field)}] [env: {variable_of(cls, name)}]".replace("%", "%%")
        given: dict[str, Any] = {"dest": f"{_DEST}{name}", "default": None, "help": text}
        choices = choices_of(field)
        if field.annotation is bool:
            given["action"] = argparse.BooleanOptionalAction
        elif choices:
            given["choices"] = choices
        else:
            given["metavar"] = metavar_of(name, field)
        if any(isinstance(mark, Repeated) for mark in field.metadata):
            given["action"] = "append"
        parser.add_argument(flag, **given)


def add_config_options(parser: Any, cls: type[BaseSettings], *, check: bool = True) -> None:
    """Add `--config`, and `--check-config` if the command calls `settle`."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"TOML file whose table [{table_of(cls)}] holds settings, below flags and environment "
        f"[default: none] [env: {VARIABLE}]",
    )
    if check:
        text = "start nothing; show every setting as JSON, and all that is wrong"
        parser.add_argument("--check-config", action="store_true", help=text)


def epilog(cls: type[BaseSettings]) -> str:
    """Return the end of a help text: what holds for all settings of a process."""
    secrets = [variable_of(cls, name) for name, field in cls.model_fields.items() if is_secret(field)]
    return (
        f"An option that names an environment variable may be given there, or by its name with underscores in the "
        f"table [{table_of(cls)}] of the --config file. Flags come before the environment, the environment before the "
        f"file. Secrets have no flag, since lists of processes would show them: {', '.join(secrets)}."
    )


def layers_of(cls: type[S], options: argparse.Namespace) -> Layers[S]:
    """Return the sources of a command line's settings. Raises BadRequest for a file that cannot be read."""
    given = {name: getattr(options, f"{_DEST}{name}", None) for name in cls.model_fields}
    flags = {name: _parsed(cls, name, value) for name, value in given.items() if value is not None}
    return Layers(cls, flags, config_file(options.config))


def settle(cls: type[S], options: argparse.Namespace, program: str, check: Callable[[S], object] | None = None) -> S:
    """Return the settings of a command line; with --check-config print the report and end.

    check: raises BadRequest for what is wrong beyond the model. Raises BadRequest, and SystemExit after a report.
    """
    layers = layers_of(cls, options)
    if not options.check_config:
        return layers.load()
    found = layers.report(check)
    print(json.dumps(found, indent=1), flush=True)
    for line in (*found["problems"], *(f"{name}: must be given" for name in found["missing"])):
        print(f"{program}: {line}", file=sys.stderr)
    raise SystemExit(2 if found["problems"] or found["missing"] else 0)


def _parsed(cls: type[BaseSettings], name: str, given: Any) -> Any:
    """Return a flag's value as the model takes it."""
    if isinstance(given, list):
        return ",".join(given)
    return _json_or_text(given) if metavar_of(name, cls.model_fields[name]) == "JSON" else given
