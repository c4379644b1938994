"""Run the commands of `outrider-edge releases`, which show and change what this device remembers of draft releases."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from edge_agent.config import EdgeSettings
from outrider.core.errors import BadRequest
from outrider.settings import add_config_options, add_settings, layers_of

if TYPE_CHECKING:  # importing them takes long, and help does without
    from edge_agent.releases.state import InstalledRelease, ReleaseState


def add_commands(commands: Any) -> None:
    """Add the parser of `releases` and of its verbs. commands: the subparsers of `outrider-edge`."""
    text = "draft releases on this device: what is in use, what was refused"
    verbs = commands.add_parser("releases", help=text, description=text).add_subparsers(required=True, metavar="VERB")
    for name, run, does in (
        ("status", _status, "show the state of every target"),
        ("forget", _forget, "give releases that were refused another try"),
    ):
        verb = verbs.add_parser(name, help=does, description=does)
        add_settings(verb, EdgeSettings, ("cache_dir",))
        add_config_options(verb, EdgeSettings, check=False)
        verb.add_argument("--verbose", action="store_true", help="log everything to standard error")
        verb.set_defaults(run=run)


async def _status(args: argparse.Namespace) -> None:
    from edge_agent.releases.state import FOLDER, folders, read

    root = layers_of(EdgeSettings, args).load().cache_dir / FOLDER
    found = list(folders(root))
    for target, folder in found:
        print(f"target {target}", *_described(read(folder, keep=False)), sep="\n  ")
    if not found:
        print(f"no releases in {root}; is OUTRIDER_EDGE_RELEASE_KEYS set where the client runs?", file=sys.stderr)


async def _forget(args: argparse.Namespace) -> None:
    """Forget refusals. Raises BadRequest while a client keeps a folder, which would overwrite the state."""
    from edge_agent.releases.state import FOLDER, ReleaseFolder, folders

    for target, path in folders(layers_of(EdgeSettings, args).load().cache_dir / FOLDER):
        folder = ReleaseFolder.open(path.parent, target)
        if not folder.writable:
            raise BadRequest(f"a client keeps {path} now; end it first")
        count = len(folder.state.refused)
        folder.write(folder.state.forgotten())
        folder.close()
        print(f"target {target}: {count} refused release{'' if count == 1 else 's'} forgotten")


def _described(state: ReleaseState) -> Iterator[str]:
    yield f"in use     {_named(state.current)}"
    yield f"last good  {_named(state.last_good)}"
    yield f"floor      {f'version {state.floor}' if state.floor else 'none'}"
    yield f"device     {state.device_id}"
    for refusal in state.refused:
        at = datetime.datetime.fromtimestamp(refusal.at_unix, datetime.UTC).isoformat(timespec="seconds")
        yield f"refused    {_named(refusal.release)} {at}: {refusal.kind}: {refusal.reason}"


def _named(release: InstalledRelease | None) -> str:
    if release is None:
        return "n-grams alone"
    return f"{release.digest[:12]} (version {release.version}, {'canary' if release.canary else 'stable'})"
