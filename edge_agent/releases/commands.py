"""`outrider-edge releases`: what this device remembers of draft releases."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_agent.config import EdgeSettings
from edge_agent.releases.state import InstalledRelease, ReleaseState
from edge_agent.releases.store import FOLDER, SlotStore, folders, read
from outrider.core.errors import BadRequest
from outrider.settings.options import add_config_options, add_settings, layers_of


def add_commands(commands: Any) -> None:
    """The verbs below `releases`."""
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
    found = list(folders(_root(args)))
    for target, folder in found:
        print(f"target {target}", *describe(read(folder, keep=False)), sep="\n  ")
    if not found:
        print(
            f"no releases in {_root(args)}; is OUTRIDER_EDGE_RELEASE_KEYS set where the client runs?", file=sys.stderr
        )


async def _forget(args: argparse.Namespace) -> None:
    """Raises BadRequest where a client is at it: it would write its own state over this."""
    for target, folder in folders(_root(args)):
        store = SlotStore.open(folder.parent, target)
        if not store.ours:
            raise BadRequest(f"a client keeps {folder} at this moment; end it first")
        count = len(store.state.refused)
        store.change(store.state.forgotten())
        store.close()
        print(f"target {target}: {count} refused release{'' if count == 1 else 's'} forgotten")


def describe(state: ReleaseState) -> Iterator[str]:
    """Lines for people."""
    yield f"in use     {_slot(state.current)}" + ("" if state.trial is None else f", on trial: {_trial(state)}")
    yield f"last good  {_slot(state.last_good)}"
    yield f"floor      {f'version {state.floor}' if state.floor else 'none'}"
    yield f"device     {state.device_id}"
    for refusal in state.refused:
        at = datetime.datetime.fromtimestamp(refusal.at_unix, datetime.UTC).isoformat(timespec="seconds")
        yield f"refused    {refusal.digest[:12]} (version {refusal.version}) {at}: {refusal.kind}: {refusal.reason}"


def _slot(slot: InstalledRelease | None) -> str:
    if slot is None:
        return "the verifier's own draft"
    return f"{slot.digest[:12]} (version {slot.version}, {'canary' if slot.canary else 'stable'})"


def _trial(state: ReleaseState) -> str:
    score = state.trial.now.score if state.trial is not None else None
    return f"{score.right} of {score.guessed} guesses right so far" if score else ""


def _root(args: argparse.Namespace) -> Path:
    """Raises BadRequest."""
    return layers_of(EdgeSettings, args).load().cache_dir / FOLDER
