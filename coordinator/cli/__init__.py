"""The operator's command, `outrider`.

`arguments` describes the command line and `command` runs what it names: a module for each noun, which is imported only
then. `output` prints what a command has found, as a table (`tables`) or as JSON or YAML (`json_views`).
"""

from coordinator.cli.command import main

__all__ = ["main"]
