"""The sources of one process's settings on top of one another, by pydantic-settings, and which of them said what."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource

from outrider.settings.file import TABLES, Table, named, open_to_others, prefix_of, table_of
from outrider.settings.problems import Problem, WrongSettings, got, is_secret, near, nearest, plain

S = TypeVar("S", bound=BaseSettings)
Source = Literal["flag", "environment", "file", "default"]
ALTERNATIVES = "ALTERNATIVES"
"""Of a settings model, where it has it: names of settings of which only one can be heeded."""
_ANYTHING = "."
"""For a setting that must be given and was not, so that the others can be held against one another."""
_OF_A_SERVICE = re.compile(r"SERVICE_(HOST|PORT)|PORT(_\d+_(TCP|UDP))?|SERVICE_PORT_.*|PORT_\d+_(TCP|UDP)_.*")
"""What Kubernetes adds for a service that has our name."""


class Flag(str):
    """In a field's annotation: its flag, where that is not `--` and its name."""


class Repeated(Flag):
    """One that may be given several times, for a setting with commas in it."""


def flag_of(cls: type[BaseSettings], name: str) -> str:
    """The flag of a setting; "" for a secret, which has none: lists of processes would show it."""
    field = cls.model_fields[name]
    if is_secret(field):
        return ""
    return next((str(mark) for mark in field.metadata if isinstance(mark, Flag)), f"--{name.replace('_', '-')}")


def variable_of(cls: type[BaseSettings], name: str) -> str:
    return f"{prefix_of(cls)}{name}".upper()


class Environment(EnvSettingsSource):
    """Variables; one that should be JSON and is not is left to the model to refuse, beside all others."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return json.loads(value)
        except ValueError:
            return value


class Layers(Generic[S]):
    """flags: by the settings' names. file: read at once; raises BadRequest where that cannot be."""

    def __init__(self, cls: type[S], flags: Mapping[str, Any] | None = None, file: Path | None = None) -> None:
        self.cls = cls
        self.table = Table(cls, file) if file is not None else None
        self._given: dict[Source, dict[str, Any]] = {
            "flag": InitSettingsSource(cls, dict(flags or {}))(),
            "environment": Environment(cls)(),
            "file": self.table() if self.table is not None else {},
        }
        self._choose(getattr(cls, ALTERNATIVES, ()))

    def source(self, name: str) -> Source:
        """The first that has it."""
        return next((source for source, values in self._given.items() if name in values), "default")

    def raw(self, name: str) -> Any:
        """As it was given, or the default; None for one that must be given and is not."""
        for values in self._given.values():
            if name in values:
                return values[name]
        field = self.cls.model_fields[name]
        return None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})

    def load(self) -> S:
        """Raises WrongSettings."""
        config, problems = self.attempt()
        if config is None or problems:
            raise WrongSettings(problems)
        return config

    def attempt(self) -> tuple[S | None, list[Problem]]:
        """The settings, or None; and all that is wrong with them and with the file's tables."""
        config, problems = self._build({})
        missing = {problem.name: _ANYTHING for problem in problems if problem.missing}
        if missing and len(missing) == len(problems):
            problems = [*problems, *self._build(missing)[1]]
        return config, [*self._strange_tables(), *problems]

    def warnings(self) -> Iterator[str]:
        """What is no error and hardly meant."""
        yield from self._strange_variables()
        secrets = [name for name, field in self.cls.model_fields.items() if is_secret(field) and self._in_file(name)]
        if secrets and self.table is not None and open_to_others(self.table.path):
            path, variables = self.table.path, ", ".join(variable_of(self.cls, name) for name in secrets)
            yield (
                f"{path} holds {', '.join(secrets)} and everybody on this machine can read it: chmod o-r {path},"
                f" or set {variables} in the environment"
            )

    def _choose(self, alternatives: Collection[str]) -> None:
        """Where a source names one of these, those below it are not asked for the others."""
        chosen = False
        for values in self._given.values():
            if chosen:
                for name in alternatives:
                    values.pop(name, None)
            chosen = chosen or any(values.get(name) for name in alternatives)

    def _in_file(self, name: str) -> bool:
        return bool(self._given["file"].get(name))

    def _build(self, more: Mapping[str, Any]) -> tuple[S | None, list[Problem]]:
        sources = tuple(InitSettingsSource(self.cls, dict(values)) for values in (*self._given.values(), more))
        try:
            return self.cls(_build_sources=(sources, {})), []
        except ValidationError as error:
            return None, [self._problem(details) for details in error.errors(include_url=False)]

    def _problem(self, error: ErrorDetails) -> Problem:
        table = table_of(self.cls)
        if not error["loc"]:
            return Problem(table, error["msg"].removeprefix("Value error, "))
        name, *rest = map(str, error["loc"])
        if error["type"] == "extra_forbidden":
            what = f"no such setting{near(name, self.cls.model_fields)}"
            return Problem(f"{self._in_table} {plain(name)}", what)
        if error["type"] == "missing" and not rest:
            flag = flag_of(self.cls, name)
            ways = ", ".join(filter(None, (flag, variable_of(self.cls, name))))
            what = f"{error['msg']}; give it as {ways} or in [{table}] of a --config file"
            return Problem(name, what, name, missing=True)
        secret = is_secret(self.cls.model_fields[name])
        what = error["msg"] if secret else f"{error['msg']}, got {got(error['input'])}"
        return Problem(".".join([self._named(name), *map(plain, rest)]), what, name)

    def _named(self, name: str) -> str:
        """A setting as its source calls it."""
        match self.source(name):
            case "flag":
                return flag_of(self.cls, name) or name
            case "environment":
                return variable_of(self.cls, name)
            case "file":
                return f"{self._in_table} {name}"
        return name

    @property
    def _in_table(self) -> str:
        table = table_of(self.cls)
        return f"{self.table.path}: [{table}]" if self.table is not None else table

    def _strange_tables(self) -> Iterator[Problem]:
        if self.table is None:
            return
        for name, value in self.table.tables.items():
            where = f"{self.table.path}: [{plain(name)}]"
            if name not in TABLES:
                yield Problem(where, f"no such table{near(name, TABLES)}; tables are {', '.join(TABLES)}")
            elif not isinstance(value, dict):
                yield Problem(where, f"must be a table of settings, got {got(value)}")

    def _strange_variables(self) -> Iterator[str]:
        fields = self.cls.model_fields
        for name, variable in variables(prefix_of(self.cls)).items():
            if name in fields:
                continue
            found = nearest(name, fields)
            hint = f"; the nearest is {variable_of(self.cls, found)}" if found else ""
            yield f"{plain(variable)} is set, and there is no such setting{hint}"


def variables(prefix: str) -> dict[str, str]:
    """The environment's with this in front, by what follows it in small letters; without what Kubernetes adds."""
    names = {variable.upper().removeprefix(prefix): variable for variable in sorted(os.environ)}
    return {
        name.lower(): variable
        for name, variable in names.items()
        if name != variable.upper() and not _OF_A_SERVICE.fullmatch(name)
    }


def from_environment(cls: type[S]) -> S:
    """Of a process without flags. The file is the one that OUTRIDER_CONFIG names. Raises BadRequest."""
    return Layers(cls, {}, named()).load()
