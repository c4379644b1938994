"""Show every setting of a process with its source, and all that is wrong, for `--check-config`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import SecretStr
from pydantic_settings import BaseSettings

from outrider.core.errors import BadRequest
from outrider.core.text import table
from outrider.settings.layers import Layers, table_of, variable_of
from outrider.settings.problems import SettingProblem, is_secret, without_passwords

S = TypeVar("S", bound=BaseSettings)
FORMS = ("table", "json")
MASK = "********"


def report(layers: Layers[S], check: Callable[[S], object] | None = None) -> dict[str, Any]:
    """Return the settings (name, value, source, variable), problems and warnings of a process, ready for JSON.

    check: called with settings that the model accepts; raises BadRequest for what is wrong beyond the model.
    """
    config, problems = layers.attempt()
    if config is not None and not problems and check is not None:
        try:
            check(config)
        except BadRequest as error:
            problems = [SettingProblem(table_of(layers.cls), str(error), error.field)]
    return {
        "process": table_of(layers.cls),
        "file": str(layers.file) if layers.file is not None else None,
        "settings": [_setting(layers, config, name) for name in layers.cls.model_fields],
        "problems": [{"where": p.where, "what": p.what, "missing": p.missing} for p in problems],
        "warnings": list(layers.warnings()),
    }


def render(found: Mapping[str, Any], form: str) -> str:
    """Return a report as one of `FORMS`; the table has the settings alone."""
    if form == "json":
        return json.dumps(found)
    rows = [(s["name"], shown(s["value"]), s["source"]) for s in found["settings"]]
    return table(("SETTING", "VALUE", "SOURCE"), rows)


def complaints(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a report's problems and warnings, one line each."""
    yield from (f"{problem['where']}: {problem['what']}" for problem in found["problems"])
    yield from (f"warning: {warning}" for warning in found["warnings"])


def shown(value: Any) -> str:
    """Return a value in one line; `-` if it is not set."""
    if value is None or value == "":
        return "-"
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _setting(layers: Layers[Any], config: BaseSettings | None, name: str) -> dict[str, Any]:
    value = layers.raw(name) if config is None else getattr(config, name)
    if is_secret(layers.cls.model_fields[name]):
        value = MASK if (value.get_secret_value() if isinstance(value, SecretStr) else value) else None
    else:
        value = _plain(value)
    return {"name": name, "value": value, "source": layers.source(name), "variable": variable_of(layers.cls, name)}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, without the passwords of URLs."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return without_passwords(str(value))
