"""Show which drafts devices use and why, and promote, roll back, pin or publish one (`outrider releases`)."""

from __future__ import annotations

import argparse
import json
import time
from base64 import b64decode
from collections.abc import Sequence

from coordinator.cli.connection import AdminCall
from coordinator.cli.output import SHORT, Columns, Document, Result, facts, fields, table
from coordinator.cli.tenants import date
from outrider.core.errors import BadRequest
from outrider.wire import manifest as manifests
from outrider.wire.manifest import name_of, read_unverified, state_of
from outrider.wire.ticket import Signer
from outrider.wire.v1 import coordinator_pb2 as pb

COLUMNS: Columns = {
    "RELEASE": lambda r: r["release"][:SHORT],
    "VERSION": lambda r: str(r["version"]),
    "TARGET": lambda r: r["weights_hash"].removeprefix("sha256:")[:SHORT],
    "STATE": lambda r: _state(r),
    "SINCE": lambda r: date(r["since_unix"]),
    "SIZE": lambda r: f"{r['size'] / 1e6:.1f} MB",
    "REASON": lambda r: r["reason"],
}
_WERE_STABLE = (pb.RELEASE_STATE_STABLE, pb.RELEASE_STATE_SUPERSEDED)


async def list_releases(options: argparse.Namespace, call: AdminCall) -> Result:
    known = await _releases(call)
    notice = f"{options.limit} of {len(known)} releases are shown; --limit N shows more"
    return _listed(known[: options.limit], notice if len(known) > options.limit else "")


async def show_release(options: argparse.Namespace, call: AdminCall) -> Result:
    shown = list(map(_document, await _releases(call, options.release)))
    return Result({"releases": shown}, "\n\n".join(map(facts, shown)))


async def publish(options: argparse.Namespace, call: AdminCall) -> Result:
    file = options.manifest
    try:
        raw = b64decode(json.loads(file.read_bytes())["manifest"], validate=True)
    except OSError as error:
        raise BadRequest(f"manifest {file} cannot be read: {error.strerror}", field="manifest") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"{file} is no manifest that `outrider-distill publish` wrote", field="manifest") from error
    name = name_of(read_unverified(raw))
    await _publish(call, raw)
    return _listed((await _releases(call, name))[:1])


async def update(options: argparse.Namespace, call: AdminCall) -> Result:
    """Promote, pin or unpin a release."""
    return await _updated(call, options.release, options.verb.upper())


async def roll_back(options: argparse.Namespace, call: AdminCall) -> Result:
    """Roll back a release; a stable one, given a key, by signing the draft before it as the next version.

    Devices take no older version. The new one goes to all devices at once.
    """
    if options.key is None:
        return await _updated(call, options.release, "ROLL_BACK")
    signer = Signer.load(options.key)
    known = await _releases(call)
    current = (await _releases(call, options.release))[0]
    if current.state != pb.RELEASE_STATE_STABLE:
        return await _updated(call, options.release, "ROLL_BACK")
    _check_key(current, signer)
    if current.pinned:
        raise BadRequest(
            f"the stable release is pinned, and nothing replaces it; `outrider releases unpin {options.release}` first"
        )
    again = _stable_before(current, known)
    again.version, again.created_unix = _next_version(again.weights_hash, known), time.time()
    name = name_of(again)
    await _publish(call, manifests.sign(again, signer))
    released = (await _releases(call, name))[0]
    if released.state != pb.RELEASE_STATE_CANARY:
        return _listed(
            [released],
            "another release is on trial: roll it back, and this one goes on trial;"
            f" `outrider releases promote {name[:SHORT]}` then gives it to everybody",
        )
    return await _updated(call, name, "PROMOTE")


async def _releases(call: AdminCall, release: str = "") -> list[pb.Release]:
    """Return all releases, or those whose hash begins with `release`; the newest of each target first."""
    return list((await call("ListReleases", pb.ListReleasesRequest(release=release))).releases)


async def _publish(call: AdminCall, manifest: bytes) -> None:
    await call("UpdateRelease", pb.UpdateReleaseRequest(action="RELEASE_ACTION_PUBLISH", manifest=manifest))


async def _updated(call: AdminCall, release: str, action: str) -> Result:
    request = pb.UpdateReleaseRequest(release=release, action=f"RELEASE_ACTION_{action}")
    answer = await call("UpdateRelease", request)
    return _listed([answer.release])


def _listed(releases: Sequence[pb.Release], notice: str = "") -> Result:
    shown = list(map(_document, releases))
    none = "no releases: devices draft with what their verifiers offer"
    return Result({"releases": shown}, table(COLUMNS, shown, none), notice)


def _check_key(current: pb.Release, signer: Signer) -> None:
    """Raise BadRequest for another publisher's key: devices may trust only the publisher of the draft they have."""
    theirs = pb.SignedManifest.FromString(current.manifest).key_id
    if signer.key_id != theirs:
        raise BadRequest(
            f"the key is {signer.key_id}, and the stable release is signed with {theirs}: devices may not trust this"
            f" one; give the key of {theirs}, or sign the draft before with yours and publish it"
        )


def _stable_before(current: pb.Release, known: Sequence[pb.Release]) -> pb.Manifest:
    """Return the manifest that was stable before and was not itself rolled back. known: the newest release first.

    Raises BadRequest if there is none.
    """
    now = read_unverified(current.manifest)
    stable: list[pb.Manifest] = []  # each replaced the one before it; the present one is last
    for release in reversed(known):
        manifest = read_unverified(release.manifest)
        if manifest.weights_hash != now.weights_hash or release.state not in _WERE_STABLE:
            continue
        again = next((i for i, one in enumerate(stable) if one.artifact == manifest.artifact), len(stable))
        stable[again:] = [manifest]  # going back to a draft undoes all that came after it
    if len(stable) < 2:
        raise BadRequest(
            f"no release was stable before version {now.version}, but such as were rolled back; publish another"
            f" draft as version {_next_version(now.weights_hash, known)}"
        )
    return stable[-2]


def _next_version(weights: str, known: Sequence[pb.Release]) -> int:
    versions = [m.version for m in (read_unverified(r.manifest) for r in known) if m.weights_hash == weights]
    return max(versions) + 1


def _document(release: pb.Release) -> Document:
    return {
        "release": release.name,
        "signed_by": pb.SignedManifest.FromString(release.manifest).key_id,
        **fields(read_unverified(release.manifest)),
        **fields(release, "manifest", "name", "version"),
        "state": state_of(release),
    }


def _state(r: Document) -> str:
    share = f" {r['share']:.0%}" if r["state"] == "canary" else ""
    return f"{r['state'].replace('_', ' ')}{share}{', pinned' if r['pinned'] else ''}"
