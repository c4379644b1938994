"""What the coordinator decides of draft releases. No protobuf, no gRPC, no redis."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.records import VerifierStatus
from coordinator.releases import evidence, lifecycle
from coordinator.releases.backup import Backup
from coordinator.releases.canary import drawn
from coordinator.releases.records import Evidence, Offer, Order, Release, ReleaseTrack, Rule, Sample, State, Trial
from coordinator.releases.store import ReleaseStore
from coordinator.store.verifiers import VerifierStore
from outrider.artifacts.hashing import known_file_digest
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import BadRequest, OutriderError
from outrider.core.telemetry import SessionTelemetry
from outrider.wire import manifest as manifests
from outrider.wire.manifest import Manifest

log = logging.getLogger(__name__)

MAX_SEEN = 4_096
"""Verifiers whose targets' trials are remembered here."""


@dataclass(frozen=True)
class ReleaseTerms:
    """How this coordinator handles releases."""

    rule: Rule
    per_session: int
    """Samples of a session on each side, at most."""
    publishers: Mapping[str, bytes]
    """Key id -> raw key of those whose releases are taken; empty takes everybody's whom Admin lets in."""
    base_url: str = ""
    """Of the files that it serves; empty where it serves none."""


@dataclass(frozen=True)
class _Seen:
    """What was on trial on a verifier's target when it was last looked at."""

    serial: int = 0
    weights: str = ""
    trial: Trial | None = None


@dataclass
class _Weighed:
    """The evidence of a trial and what it was made from."""

    samples: list[Sample]
    evidence: Evidence


class ReleaseHandlers:
    """One for each process; what it holds is read again from the store when that has changed."""

    def __init__(
        self,
        releases: ReleaseStore,
        verifiers: VerifierStore,
        backup: Backup,
        terms: ReleaseTerms,
        artifacts: ArtifactStore | None = None,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._releases = releases
        self._verifiers = verifiers
        self._backup = backup
        self._terms = terms
        self._artifacts = artifacts
        self._now = now
        self._seen: dict[str, _Seen] = {}
        self._weighed: dict[tuple[str, int], _Weighed] = {}

    async def offer(self, weights: str, device_id: str) -> Offer:
        """The canary for those drawn for it, the stable release for all others. Raises Unavailable."""
        serial, found = await self._releases.lines(weights)
        line = found[0].line if found else ReleaseTrack(weights)
        canary = line.canary
        tries = canary is not None and drawn(device_id, canary.name, canary.share)
        return Offer(serial, canary if tries else line.stable, self._terms.base_url)

    async def publish(self, raw: bytes) -> State:
        """Take a signed manifest. Raises BadRequest, ModelRefused for an unknown publisher, or Unavailable."""
        manifest = self._believed(raw)
        _, found = await self._releases.lines()
        if await self._backup.restore(found, self._now()):
            _, found = await self._releases.lines()
        if not any(release.manifest == raw for one in found for release in one.line.releases):
            _check_target(manifest, await self._verifiers.find())
            if self._artifacts is not None:
                await asyncio.to_thread(check_served, self._artifacts, manifest)
        share = self._terms.rule.share
        new = Release(raw, manifest.version, manifest.digest, State.CANDIDATE, self._now(), "published")
        line = await self._releases.change(
            manifest.weights_hash, lambda line: lifecycle.publish(line, new, self._now(), share)
        )
        await self._keep()
        published = next(release for release in line.releases if release.manifest == raw)
        log.info("release %s, version %d: %s", published.name, published.version, published.state.value)
        return published.state

    async def listed(self, beginning: str) -> tuple[int, list[Release]]:
        """The serial, and all releases, or the one whose hash begins so, each with its evidence; the newest first.

        Raises NotFound, BadRequest or Unavailable.
        """
        serial, found = await self._releases.lines()
        lines = [one.line for one in found]
        if beginning:
            line, release = lifecycle.find(lines, beginning)
            same = [r for r in line.releases if r.name == release.name]
            return serial, [await self._with_evidence(line, r) for r in same]
        shown = [await self._with_evidence(line, release) for line in lines for release in line.releases]
        return serial, shown

    async def steer(self, beginning: str, order: Order) -> Release:
        """Do as an operator says. Raises NotFound, BadRequest or Unavailable."""
        _, found = await self._releases.lines()
        line, chosen = lifecycle.find([one.line for one in found], beginning)
        share = self._terms.rule.share

        def steered(line: ReleaseTrack) -> ReleaseTrack:
            now = next((release for release in line.releases if release.manifest == chosen.manifest), None)
            return line if now is None else lifecycle.steer(line, now, order, self._now(), share)

        after = await self._releases.change(line.weights_hash, steered)
        await self._keep()
        release = next((r for r in after.releases if r.manifest == chosen.manifest), chosen)
        log.info("%s of release %s by an operator: %s", order.value, release.name, release.state.value)
        return release

    async def hear(self, verifier_id: str, sessions: Sequence[SessionTelemetry]) -> int:
        """Take what sessions show of a trial; the serial. A report never fails for it: 0 where that is unknown."""
        try:
            seen = await self._trial(verifier_id)
            if seen.trial is not None:
                await self._releases.sample(seen.weights, seen.trial, sessions, self._terms.per_session)
        except OutriderError as error:
            log.warning("nothing is sampled of what verifier %s reports: %s", verifier_id, error)
            return 0
        except Exception:
            log.exception("nothing is sampled of what verifier %s reports", verifier_id)
            return 0
        return seen.serial

    async def serial(self) -> int:
        """Grows whenever a release changes its state; 0 where there are none, or where that is unknown."""
        try:
            return await self._releases.serial()
        except OutriderError:
            return 0

    async def tend(self) -> None:
        """Bring back what the store has lost, keep a copy of what it has, and decide. Raises Unavailable.

        Every coordinator does so; whoever comes second finds it done.
        """
        _, found = await self._releases.lines()
        if await self._backup.restore(found, self._now()):
            _, found = await self._releases.lines()
        await self._backup.keep(found)
        running = {(one.line.weights_hash, c.version) for one in found if (c := one.line.canary) is not None}
        self._weighed = {trial: weighed for trial, weighed in self._weighed.items() if trial in running}
        for one in found:
            try:
                await self._decide(one.line)
            except OutriderError:
                raise
            except Exception:  # one target's is no reason to leave the others' undecided
                log.exception("nothing is decided on the releases of %s", one.line.weights_hash)

    async def _decide(self, line: ReleaseTrack) -> None:
        canary = line.canary
        if canary is None:
            return
        shown = await self._evidence(line, canary)
        rule = self._terms.rule
        if lifecycle.judge(line, shown, rule, self._now()) is None:
            return

        def settled(now: ReleaseTrack) -> ReleaseTrack:
            verdict = lifecycle.judge(now, shown, rule, self._now())  # it may have been pinned meanwhile
            return now if verdict is None else lifecycle.settle(now, canary, verdict, shown, self._now(), rule.share)

        after = await self._releases.change(line.weights_hash, settled)
        await self._keep()
        decided = next((r for r in after.releases if r.manifest == canary.manifest), canary)
        if decided.state is not State.CANARY:
            log.warning(
                "release %s, version %d: %s, %s", decided.name, decided.version, decided.state.value, decided.reason
            )

    async def _keep(self) -> None:
        """At once: what is decided is worth more than the second until the next look."""
        _, found = await self._releases.lines()
        await self._backup.keep(found)

    async def _with_evidence(self, line: ReleaseTrack, release: Release) -> Release:
        if release.state is not State.CANARY:
            return release
        return replace(release, evidence=await self._evidence(line, release))

    async def _evidence(self, line: ReleaseTrack, canary: Release) -> Evidence:
        """Weighed again only where samples have come."""
        trial = (line.weights_hash, canary.version)
        known = self._weighed.get(trial, _Weighed([], Evidence()))
        samples = await self._releases.samples(*trial, known=len(known.samples))
        if samples is not None:
            known = _Weighed(samples, await asyncio.to_thread(evidence.weigh, samples, self._terms.rule))
            self._weighed[trial] = known
        return known.evidence

    async def _trial(self, verifier_id: str) -> _Seen:
        """Releases are read only where they or the verifier's target have changed."""
        seen = self._seen.get(verifier_id, _Seen())
        serial, weights, line = await self._releases.on_target(verifier_id, seen.serial, seen.weights)
        if (serial, weights) != (seen.serial, seen.weights):
            seen = _Seen(serial, weights, _trial_of(line) if line is not None else None)
            if len(self._seen) >= MAX_SEEN:
                self._seen.clear()
            self._seen[verifier_id] = seen
        return seen

    def _believed(self, raw: bytes) -> Manifest:
        if self._terms.publishers:
            return manifests.verify(raw, self._terms.publishers)
        return manifests.read_unverified(raw)


def _trial_of(line: ReleaseTrack) -> Trial | None:
    canary, stable = line.canary, line.stable
    return Trial(canary.name, canary.version, stable.name if stable else "") if canary is not None else None


def _check_target(manifest: Manifest, fleet: Sequence[VerifierStatus]) -> None:
    """Raises BadRequest for a draft of another vocabulary than its target's. Its target may be down for now."""
    targets = [v.registration.target for v in fleet if v.registration.target.weights_hash == manifest.weights_hash]
    if not targets:
        log.warning("no verifier serves %s, for which version %d is", manifest.weights_hash, manifest.version)
    known = sorted({target.tokenizer_hash for target in targets})
    if known and manifest.tokenizer_hash not in known:
        raise BadRequest(
            f"manifest.tokenizer_hash is {manifest.tokenizer_hash!r}, and target {targets[0].name!r} has {known[0]!r}:"
            " the draft would mean other text by the same ids; build it with the target's own tokenizer",
            field="manifest.tokenizer_hash",
        )


def check_served(artifacts: ArtifactStore, manifest: Manifest) -> None:
    """Raises BadRequest if devices would not get from this coordinator's folder what the manifest says.

    A file that is only elsewhere, by absolute URLs, is not looked at.
    """
    path = artifacts.find(manifest.digest)
    if path is None:
        if manifest.urls and all("://" in url for url in manifest.urls):
            return
        raise BadRequest(
            f"{manifest.digest}.gguf is not in {artifacts.folder}, from where devices would fetch it; put it there"
            " first, or name in the manifest where it is",
            field="manifest.artifact",
        )
    try:
        size = path.stat().st_size
        if size != manifest.size:
            raise BadRequest.bound("manifest.size", manifest.size, f"{size} bytes, as {path.name} has")
        found = known_file_digest(path)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", field="manifest.artifact") from error
    if found != manifest.digest:
        raise BadRequest(
            f"{path} is damaged or another file: its SHA-256 is {found}; put the right one there",
            field="manifest.artifact",
        )
