"""What `--check-config` tells: every setting of a process, where it came from, and all that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import SecretStr
from pydantic_settings import BaseSettings

from outrider.core.errors import BadRequest
from outrider.core.text import table
from outrider.settings.file import table_of
from outrider.settings.layers import Layers, variable_of
from outrider.settings.problems import Problem, is_secret, veiled

S = TypeVar("S", bound=BaseSettings)
FORMS = ("table", "json")
MASK = "********"


@dataclass(frozen=True)
class Report:
    """Of one process."""

    process: str
    file: str | None
    settings: tuple[dict[str, Any], ...]
    """name, value, source, variable."""
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.problems

    @property
    def complaints(self) -> Iterator[str]:
        """For people."""
        yield from map(str, self.problems)
        yield from (f"warning: {warning}" for warning in self.warnings)

    def render(self, form: str) -> str:
        return json.dumps(self._document()) if form == "json" else self._table()

    def _document(self) -> dict[str, Any]:
        return {
            "process": self.process,
            "file": self.file,
            "settings": list(self.settings),
            "problems": [{"where": p.where, "what": p.what, "missing": p.missing} for p in self.problems],
            "warnings": list(self.warnings),
        }

    def _table(self) -> str:
        rows = [(s["name"], written(s["value"]), s["source"]) for s in self.settings]
        return table(("SETTING", "VALUE", "SOURCE"), rows)


def of(layers: Layers[S], check: Callable[[S], object] | None = None) -> Report:
    """check: raises BadRequest for what is wrong beyond the model, which only good settings are asked for."""
    config, problems = layers.attempt()
    if config is not None and not problems and check is not None:
        try:
            check(config)
        except BadRequest as error:
            problems = [Problem(table_of(layers.cls), str(error), error.field)]
    return Report(
        table_of(layers.cls),
        str(layers.table.path) if layers.table is not None else None,
        tuple(_setting(layers, config, name) for name in layers.cls.model_fields),
        tuple(problems),
        tuple(layers.warnings()),
    )


def written(value: Any) -> str:
    """A value in one line; what is not set is `-`."""
    if value is None or value == "":
        return "-"
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _setting(layers: Layers[Any], config: BaseSettings | None, name: str) -> dict[str, Any]:
    value = layers.raw(name) if config is None else getattr(config, name)
    shown = _masked(value) if is_secret(layers.cls.model_fields[name]) else _plain(value)
    return {"name": name, "value": shown, "source": layers.source(name), "variable": variable_of(layers.cls, name)}


def _masked(value: Any) -> str | None:
    bare = value.get_secret_value() if isinstance(value, SecretStr) else value
    return MASK if bare else None


def _plain(value: Any) -> Any:
    """As JSON would say it, without the passwords of URLs."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return veiled(str(value))
