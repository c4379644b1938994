"""`outrider`, the operator's command: a file for each noun.

`command` reads the line and says with which code it ends; `output` shows what a noun found; `documents` is what JSON
and YAML say of it, `columns` the tables.
"""

from coordinator.cli.command import main
from coordinator.cli.local import shipped_pair

__all__ = ["main", "shipped_pair"]
