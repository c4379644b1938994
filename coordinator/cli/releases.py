"""`outrider releases`: see which drafts devices use and why, and say otherwise."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.cli import json_views
from coordinator.cli.connection import Ask
from coordinator.cli.output import LIMIT, MAX_LIMIT, Shown, output_options, show
from coordinator.cli.values import at_most
from coordinator.releases.overview import describe_release, describe_releases
from outrider.core.errors import BadRequest
from outrider.wire import manifest as manifests
from outrider.wire.manifest import Manifest, read_unverified
from outrider.wire.ticket import Signer
from outrider.wire.v1 import coordinator_pb2 as pb

TIMEOUT_S = 60.0
"""The coordinator reads the whole file of a draft before it takes it."""
_ORDERS = {
    "promote": pb.RELEASE_ORDER_PROMOTE,
    "rollback": pb.RELEASE_ORDER_ROLL_BACK,
    "pin": pb.RELEASE_ORDER_PIN,
    "unpin": pb.RELEASE_ORDER_UNPIN,
}
_WERE_STABLE = (pb.RELEASE_STATE_STABLE, pb.RELEASE_STATE_SUPERSEDED)
_HELP = {
    "promote": "a candidate to canary, a canary to stable",
    "rollback": "take a candidate or canary back; of a stable one, release the draft before it again",
    "pin": "leave it as it is, whatever is measured; nothing replaces a pinned stable release",
    "unpin": "leave it to the measurements again",
}


def add_parser(commands: Any) -> None:
    releases = commands.add_parser(
        "releases",
        help="draft releases: list them, see the evidence, promote, roll back, pin, publish",
    )
    verbs = releases.add_subparsers(required=True, metavar="VERB", dest="verb")
    listed = verbs.add_parser("list", help="all, the newest of each target first")
    listed.add_argument(
        "--limit", type=at_most(MAX_LIMIT), default=LIMIT, metavar="N", help=f"show so many [default: {LIMIT}]"
    )
    verbs.add_parser("show", help="all that is known of one").add_argument("release", **_NAME)
    for verb, what in _HELP.items():
        verbs.add_parser(verb, help=what).add_argument("release", **_NAME)
    verbs.choices["rollback"].add_argument(
        "--key",
        type=Path,
        metavar="PEM",
        help="key of the publisher, to sign the draft before a stable one again [default: none]",
    )
    publish = verbs.add_parser("publish", help="a manifest that its publisher signed")
    publish.add_argument("manifest", type=Path, metavar="FILE", help="as `outrider-distill publish` writes it")
    for name, parser in verbs.choices.items():
        output_options(parser, watch=name in ("list", "show"))
        parser.set_defaults(run=lambda options: show(options, lambda ask: _answer(options, ask), timeout_s=TIMEOUT_S))


_NAME: dict[str, Any] = {"metavar": "RELEASE", "help": "the beginning of its hash"}


async def _answer(options: argparse.Namespace, ask: Ask) -> Shown:
    match options.verb:
        case "list":
            known = list((await _list(ask)).releases)
            cut = len(known) > options.limit
            notice = f"{options.limit} of {len(known)} releases are shown; --limit N shows more" if cut else ""
            return _shown(known[: options.limit], notice)
        case "show":
            found = list((await _list(ask, options.release)).releases)
            return Shown(_document(found), "\n\n".join(map(describe_release, found)))
        case "publish":
            return await _publish(ask, _read(options.manifest, "manifest"))
        case "rollback" if options.key is not None:
            return await _back(ask, options.release, options.key)
    return await _steer(ask, options.release, _ORDERS[options.verb])


def _shown(releases: list[pb.Release], notice: str = "") -> Shown:
    return Shown(_document(releases), describe_releases(releases), notice)


def _document(releases: list[pb.Release]) -> json_views.Document:
    return {"releases": list(map(json_views.release, releases))}


async def _list(ask: Ask, release: str = "") -> pb.ListReleasesResponse:
    answer: pb.ListReleasesResponse = await ask("ListReleases", pb.ListReleasesRequest(release=release))
    return answer


async def _steer(ask: Ask, release: str, order: pb.ReleaseOrder) -> Shown:
    answer = await ask("SteerRelease", pb.SteerReleaseRequest(release=release, order=order))
    return _shown([answer.release])


async def _publish(ask: Ask, raw: bytes) -> Shown:
    digest = read_unverified(raw).digest
    await ask("PublishRelease", pb.PublishReleaseRequest(manifest=raw))
    return _shown(list((await _list(ask, digest)).releases[:1]))


async def _back(ask: Ask, name: str, key: Path) -> Shown:
    """Devices take no older version: the draft before the stable one as the next version, at once for everybody."""
    signer = Signer.from_pem(_read(key, "key"))
    known = list((await _list(ask)).releases)
    current = (await _list(ask, name)).releases[0]
    if current.state != pb.RELEASE_STATE_STABLE:
        return await _steer(ask, name, pb.RELEASE_ORDER_ROLL_BACK)
    _check_key(current, signer)
    if current.pinned:
        raise BadRequest(
            f"the stable release is pinned, and nothing replaces it; `outrider releases unpin {name}` first",
            field="release",
        )
    before = _before(current, known)
    again = replace(before, version=_next(before.weights_hash, known), created_unix=time.time())
    await ask("PublishRelease", pb.PublishReleaseRequest(manifest=manifests.sign(again, signer)))
    released = (await _list(ask, again.digest)).releases[0]
    if released.state != pb.RELEASE_STATE_CANARY:
        return _shown(
            [released],
            "another release is on trial: roll it back, and this one goes on trial;"
            f" `outrider releases promote {again.digest[:12]}` then gives it to everybody",
        )
    return await _steer(ask, again.digest, pb.RELEASE_ORDER_PROMOTE)


def _check_key(current: pb.Release, signer: Signer) -> None:
    """Devices that know only the publisher of what they have would refuse what another one signed."""
    theirs = pb.SignedManifest.FromString(current.manifest).key_id
    if signer.key_id != theirs:
        raise BadRequest(
            f"the key is {signer.key_id}, and the stable release is signed with {theirs}: devices may not trust this"
            f" one; give the key of {theirs}, or sign the draft before with yours and publish it",
            field="key",
        )


def _before(current: pb.Release, known: list[pb.Release]) -> Manifest:
    """The one that was stable before, and was not itself gone back from. known: the newest first."""
    now = read_unverified(current.manifest)
    stable: list[Manifest] = []  # what each was released in place of, the present one last
    for release in reversed(known):
        manifest = read_unverified(release.manifest)
        if manifest.weights_hash != now.weights_hash or release.state not in _WERE_STABLE:
            continue
        again = next((i for i, one in enumerate(stable) if one.digest == manifest.digest), len(stable))
        stable[again:] = [manifest]  # going back to a draft undoes all that came after it
    if len(stable) < 2:
        raise BadRequest(
            f"no release was stable before version {now.version}, but such as were gone back from; publish another"
            f" draft as version {_next(now.weights_hash, known)}",
            field="release",
        )
    return stable[-2]


def _next(weights_hash: str, known: list[pb.Release]) -> int:
    versions = [m.version for m in (read_unverified(r.manifest) for r in known) if m.weights_hash == weights_hash]
    return max(versions) + 1


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadRequest(f"{what} {path} cannot be read: {error.strerror}", field=what) from error
