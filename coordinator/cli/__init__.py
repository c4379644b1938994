"""The operator's command, `outrider`: `arguments` describes the command line, and `command` runs what it names.

There is a module for each group of commands, which is imported only then. `json_views` makes documents of what a
command has found, and `output` prints them.
"""

from coordinator.cli.command import main

__all__ = ["main"]
