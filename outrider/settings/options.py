"""Make flags of a settings model: the help of each is the setting's own text, with its default and its variable."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from outrider.settings.layers import VARIABLE, Layers, Repeated, config_file, flag_of, table_of, variable_of
from outrider.settings.problems import is_secret
from outrider.settings.report import FORMS, complaints, render, report

S = TypeVar("S", bound=BaseSettings)
_DEST = "setting:"
"""The prefix of settings in a namespace, which holds other options of the same names."""
_UNITS = {"_ms": "MS", "_s": "SECONDS", "_minutes": "MINUTES", "_days": "DAYS", "_bytes": "BYTES"}
_RATE = "_per_s"
_TYPES = {int: "N", float: "X", Path: "PATH", dict: "JSON", tuple: "JSON"}


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


def parser_of(cls: type[BaseSettings], program: str, text: str) -> argparse.ArgumentParser:
    """Return the parser of a program whose options are its settings. text: says what the program does."""
    made = argparse.ArgumentParser(prog=program, usage="%(prog)s [OPTION ...]", description=text, epilog=epilog(cls))
    add_config_options(made, cls)
    add_settings(made, cls)
    return made


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
        parser.add_argument(
            "--check-config",
            nargs="?",
            choices=FORMS,
            const="table",
            help="start nothing; show every setting, where it came from, and all that is wrong",
        )


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
    """Return the settings of a command line and print warnings on stderr; with --check-config print the report and end.

    check: raises BadRequest for what is wrong beyond the model. Raises BadRequest, and SystemExit after a report.
    """
    layers = layers_of(cls, options)
    if options.check_config:
        found = report(layers, check)
        print(render(found, options.check_config), flush=True)
        for line in complaints(found):
            print(f"{program}: {line}", file=sys.stderr)
        raise SystemExit(2 if found["problems"] else 0)
    config = layers.load()
    for warning in layers.warnings():
        print(f"{program}: warning: {warning}", file=sys.stderr, flush=True)
    return config


def _parsed(cls: type[BaseSettings], name: str, given: Any) -> Any:
    """Return a flag's value; text that should be JSON and is not is left to the model to refuse."""
    if isinstance(given, list):
        return ",".join(given)
    if metavar_of(name, cls.model_fields[name]) == "JSON":
        with contextlib.suppress(ValueError):
            return json.loads(given)
    return given


def default_of(field: FieldInfo) -> str:
    """Return a setting's default as the file would have it, without quotes; the user's home is `~`."""
    if field.is_required():
        return "none, must be given"
    value = field.get_default(call_default_factory=True, validated_data={})
    if is_secret(field) or value is None or value == "":
        return "none"
    if isinstance(value, bool | dict | tuple):
        return json.dumps(value)
    return str(value).replace(str(Path.home()), "~")


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the words of which a setting takes one; () if it takes anything else."""
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def metavar_of(name: str, field: FieldInfo) -> str:
    """Return the word that stands for a setting's value in a help text: its unit, or its type."""
    kinds = {get_origin(kind) or kind for kind in (field.annotation, *get_args(field.annotation))}
    unit = next((unit for end, unit in _UNITS.items() if name.endswith(end) and not name.endswith(_RATE)), "")
    if str in kinds and "HOST:PORT" in (field.description or ""):
        return "HOST:PORT"
    return unit or next((word for kind, word in _TYPES.items() if kind in kinds), "TEXT")
