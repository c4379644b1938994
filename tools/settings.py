"""Write the tables of all settings into docs/configuration.md, or with `--check` fail if they are stale."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pydantic_settings import BaseSettings

from cloud_verifier.config import VerifierConfig
from cloud_verifier.distill.config import DistillConfig
from coordinator.config import CoordinatorConfig
from edge_agent.config import EdgeSettings
from outrider.settings import choices_of, default_of, flag_of, metavar_of, table_of, variable_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
MODELS: tuple[type[BaseSettings], ...] = (CoordinatorConfig, VerifierConfig, EdgeSettings, DistillConfig)
BEGIN, END = "<!-- begin: tools.settings -->\n", "<!-- end: tools.settings -->\n"


def reference() -> str:
    """Return all settings as Markdown, the same on every machine if XDG_CACHE_HOME is not set."""
    return "\n".join(map(_section, MODELS))


def renewed(page: str) -> str:
    """Return the page with its tables made afresh."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{reference()}{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the tables are stale")
    options = parser.parse_args()
    os.environ.pop("XDG_CACHE_HOME", None)
    page = PAGE.read_text()
    if not options.check:
        PAGE.write_text(renewed(page))
    elif renewed(page) != page:
        print(f"{PAGE} is stale, run `python -m tools.settings`", file=sys.stderr)
        raise SystemExit(1)


def _section(cls: type[BaseSettings]) -> str:
    prefix = variable_of(cls, "")
    head = f"### [{table_of(cls)}]\n\nVariables are `{prefix}` and the name in capitals.\n\n"
    return (
        head
        + "| setting | default | flag | |\n|---|---|---|---|\n"
        + "".join(_row(cls, name) for name in cls.model_fields)
    )


def _row(cls: type[BaseSettings], name: str) -> str:
    field = cls.model_fields[name]
    flag = flag_of(cls, name)
    takes = "\\|".join(choices_of(field)) or ("" if field.annotation is bool else metavar_of(name, field))
    if field.annotation is bool:
        flag = f"--[no-]{flag.removeprefix('--')}"
    shown = f"`{flag} {takes}`".replace(" `", "`") if flag else "none: a secret"
    text = " ".join((field.description or "").split()).replace("|", "\\|")
    return f"| `{name}` | {default_of(field)} | {shown} | {text} |\n"


if __name__ == "__main__":
    main()
