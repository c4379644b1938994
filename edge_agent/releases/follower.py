"""Keep a client's draft up to date with what its coordinator offers and its publishers have signed.

A release is checked by its manifest, downloaded, hashed, loaded, compared with the target's token table, and swapped in
while sessions run. Where any of this fails, the sessions keep the draft that they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from google.protobuf.message import DecodeError

from edge_agent.drafting.loading import NGRAM, Draft
from edge_agent.drafting.pool import DraftPool
from edge_agent.releases.download import RefusalKind, ReleaseRefused, download_urls, fetch
from edge_agent.releases.state import InstalledRelease, ReleaseFolder, ReleaseState
from outrider.core.backoff import Backoff
from outrider.core.errors import BadRequest, ModelRefused, OutriderError, VocabularyMismatch
from outrider.wire import manifest as manifests
from outrider.wire.channels import ClientTls
from outrider.wire.manifest import name_of
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.session_pb2 import TargetIdentity

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
"""Bytes of the largest file that is downloaded."""
RETRY_FIRST_S, RETRY_MAX_S = 5.0, 600.0
"""The pauses after what failed, at first and at most."""
SPREAD_S = 2.0
"""Time within which a device asks for a new release at a random moment, so that not all devices ask at once."""
_LOAD_TIMEOUT_S = 120.0
"""A draft that has not started within this time is refused."""
_TRANSIENT: frozenset[RefusalKind] = frozenset({"unreachable", "truncated", "no room"})
"""Reasons that may be gone at the next try; after the others the next news is waited for."""
_FINAL: frozenset[RefusalKind] = frozenset({"unusable", "vocabulary"})
"""Reasons for which a process does not try a release again."""

Ask = Callable[[pb.OfferReleaseRequest], Awaitable[pb.OfferReleaseResponse]]
"""Asks the coordinator what it offers. Raises core errors."""
LoadDraft = Callable[[Path | Sequence[Path], str, str], Awaitable[Draft]]
"""(file or files, displayed name, digest or "") -> draft. Raises VocabularyMismatch if the target's is another."""


class Follower:
    """The releases of one client. `begin` loads the draft to start with, `run` keeps it up to date until `close`.

    keys: key id -> raw public key of the trusted publishers. root: folder of all targets' releases.
    drafts: what it replaces; without a release, n-grams draft.
    tls: the cluster's authorities, since the coordinator serves files with its own certificate, and the device's one.
    """

    def __init__(
        self, keys: Mapping[str, bytes], root: Path, ask: Ask, drafts: DraftPool, tls: ClientTls | None = None
    ) -> None:
        self._keys = keys
        self._root = root
        self._ask = ask
        self._drafts = drafts
        self._tls = tls or ClientTls()
        self._target = TargetIdentity()
        self._folder: ReleaseFolder | None = None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        """Set if another serial was noticed since the coordinator was asked last."""
        self._serial, self._noticed = -1, -1
        """Serials of the coordinator's last answer, and of the latest notice."""
        self.refused: Counter[RefusalKind] = Counter()
        """Releases that were offered and not taken, or given up; each counts once by reason."""
        self._refusals: dict[str, ReleaseRefused] = {}
        """Digest of a manifest -> why its release was last refused."""

    @property
    def device_id(self) -> str:
        """Return the id by which releases are offered to this device; empty before `begin` and without a folder."""
        return self._folder.state.device_id if self._folder is not None else ""

    def notice(self, serial: int) -> None:
        """Note a serial that somebody mentioned. It is only a reason to ask: what the coordinator answers counts."""
        if serial != self._serial:
            self._noticed = serial
            self._news.set()

    async def begin(self, target: TargetIdentity, load: LoadDraft) -> Draft | None:
        """Load the release that this device has loaded before; None where there is none."""
        self._target, self._load = target, load
        try:
            self._folder = folder = await asyncio.to_thread(ReleaseFolder, self._root, target.weights_hash)
            trusting = folder.state.trusting(self._keys)
            if trusting != folder.state:
                log.warning("releases of publishers that are no longer in OUTRIDER_EDGE_RELEASE_KEYS are given up")
            await asyncio.to_thread(folder.change, trusting)  # also a new one, whose device id is kept so
            return await self._load_current(folder)
        except (OSError, ImportError) as error:
            log.warning("no releases are used, since their folder %s cannot be: %s", self._root, error)
            self._folder = None
            return None

    def run(self) -> None:
        """Follow what is offered, in the background."""
        if self._folder is not None:
            self._task = asyncio.create_task(self._follow(self._folder))

    async def close(self) -> None:
        """End in order, before the client's drafts are closed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def _follow(self, folder: ReleaseFolder) -> None:
        retry = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        pause_s: float | None = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._news.wait()
            try:
                settled = await self._update(folder)
            except Exception as error:
                log.exception("draft releases are tried again later: %s", error)
                settled = False
            if settled:
                retry.progressed()
            else:
                retry.failed()
            pause_s = None if settled else retry.due_in_s

    # --- what is offered. The methods return whether an offer is settled; if not, it is followed up later.

    async def _update(self, folder: ReleaseFolder) -> bool:
        """Ask the coordinator for its offer, and take or refuse it."""
        if self._serial >= 0:
            await asyncio.sleep(random.uniform(0.0, SPREAD_S))
        self._news.clear()
        await asyncio.to_thread(folder.read)  # another process may have taken one meanwhile
        try:
            request = pb.OfferReleaseRequest(
                target=self._target.weights_hash, device_id=folder.state.device_id, in_use=self._in_use
            )
            offer = await self._ask(request)
        except OutriderError as error:
            log.info("the coordinator could not say which release to use: %s", error)
            return False
        if self._noticed <= offer.serial:
            self._news.clear()  # what was noticed meanwhile is in the answer
        self._serial = self._noticed = offer.serial
        if not offer.manifest:
            return await self._use_none(folder)
        try:
            return await self._take(folder, offer)
        except ReleaseRefused as error:
            digest = manifest_digest(offer.manifest)
            self._note(error, digest)
            if error.kind in _TRANSIENT:
                return False
            state = folder.state
            if state.current is not None and state.current.canary and state.current.manifest != digest:
                return await self._go_back(folder, state.dropped())  # another is offered, so the canary is over
            return await self._keep_to(folder)

    async def _take(self, folder: ReleaseFolder, offer: pb.OfferReleaseResponse) -> bool:
        """Take an offer as far as that is possible now. Raises ReleaseRefused."""
        manifest = check(offer.manifest, self._keys, self._target, folder.state.floor)
        release = InstalledRelease(
            digest=name_of(manifest),
            version=manifest.version,
            canary=offer.canary,
            manifest=manifest_digest(offer.manifest),
            key_id=pb.SignedManifest.FromString(offer.manifest).key_id,
        )
        known = self._refusals.get(release.manifest)
        if known is not None and known.kind in _FINAL:
            raise known
        if self._in_use == release.digest:
            await asyncio.to_thread(folder.change, folder.state.take(release))  # it may be a canary no longer
            return True
        if not await asyncio.to_thread(folder.files.verify, release.digest):
            urls = download_urls(manifest.urls, offer.base_url, release.digest)
            if not await self._fetch(folder, manifest, urls):
                return False
        if not await self._drafts.retired():
            return False  # no third model is loaded
        draft = await self._loaded(folder, release)
        try:
            await asyncio.to_thread(folder.read)  # as above: all of this may have taken minutes
            await asyncio.to_thread(folder.change, folder.state.take(release))
        except BaseException:  # a cancellation
            await self._drafts.free(draft)
            raise
        self._drafts.replace(draft)
        await asyncio.to_thread(folder.tidy)
        log.info("drafting with %s from now on", release)
        return True

    async def _fetch(self, folder: ReleaseFolder, manifest: pb.Manifest, urls: tuple[str, ...]) -> bool:
        """Fetch a file; return False where news come first, and then what has come of the file is kept."""
        await asyncio.to_thread(folder.tidy, name_of(manifest))
        fetching = asyncio.create_task(fetch(folder.files, name_of(manifest), manifest.size, urls, self._tls))
        news = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait({fetching, news}, return_when=asyncio.FIRST_COMPLETED)
            if fetching.done():
                await fetching
            return fetching.done()
        except OSError as error:
            raise ReleaseRefused(
                "no room",
                f"release {name_of(manifest)[:12]} of {manifest.size} bytes cannot be kept in {folder.path}: {error}; "
                "free space there, or give another folder with --cache-dir or OUTRIDER_EDGE_CACHE_DIR",
            ) from error
        finally:
            for task in (fetching, news):
                task.cancel()
            await asyncio.wait({fetching, news})

    async def _use_none(self, folder: ReleaseFolder) -> bool:
        """Use no release, since none is offered; but never go back to before a stable release."""
        state = folder.state
        is_newer = state.current is not None and state.current.version > state.floor
        if is_newer and (state.last_good is not None or state.floor == 0):
            return await self._go_back(folder, state.dropped())
        return await self._keep_to(folder)

    async def _keep_to(self, folder: ReleaseFolder) -> bool:
        """Draft with the current release of the state, where another process has gone back to it; not with one that has
        failed here."""
        current = folder.state.current
        name = current.digest if current is not None else NGRAM
        if self._in_use == name or (current is not None and current.manifest in self._refusals):
            return True
        return await self._go_back(folder, folder.state)

    async def _go_back(self, folder: ReleaseFolder, state: ReleaseState) -> bool:
        """Use the current release of another state, whose file is here, or none."""
        if not await self._drafts.retired():
            return False
        await asyncio.to_thread(folder.change, state)
        self._drafts.replace(await self._load_current(folder) or self._drafts.ngram)
        await asyncio.to_thread(folder.tidy)
        return True

    @property
    def _in_use(self) -> str:
        """Return the release that new sessions draft with; empty for none."""
        return self._drafts.draft.release if self._drafts.draft is not None else ""

    # --- what is on this device

    async def _load_current(self, folder: ReleaseFolder) -> Draft | None:
        """Load the current release, or the last good one if that fails; return None for the fallback."""
        while (release := folder.state.current) is not None:
            if not await asyncio.to_thread(folder.files.verify, release.digest):
                log.warning("the file of %s is damaged or gone: it is fetched again when offered", release)
            else:
                try:
                    return await self._loaded(folder, release)
                except ReleaseRefused as error:
                    self._note(error, release.manifest)
            await asyncio.to_thread(folder.change, folder.state.dropped())
        return None

    async def _loaded(self, folder: ReleaseFolder, release: InstalledRelease) -> Draft:
        """Load a release and start its first worker. Raises ReleaseRefused, ImportError if llama.cpp is missing."""
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT_S):
                draft = await self._load(
                    folder.files.path(release.digest), f"version {release.version}", release.digest
                )
                try:
                    await self._drafts.start(draft)
                except BaseException:  # a cancellation, above all
                    await self._drafts.free(draft)
                    raise
                return draft
        except VocabularyMismatch as error:
            raise ReleaseRefused("vocabulary", f"{release} has another vocabulary than the target: {error}") from error
        except TimeoutError:
            raise ReleaseRefused("unusable", f"{release} had not started after {_LOAD_TIMEOUT_S:.0f} s") from None
        except ImportError:
            raise
        except Exception as error:
            raise ReleaseRefused("unusable", f"{release} cannot be loaded: {error}") from error

    def _note(self, error: ReleaseRefused, manifest: str) -> None:
        """Log and count a refusal unless it is the release's last one again. manifest: digest of its manifest."""
        known = self._refusals.get(manifest)
        if known is None or known.kind != error.kind:
            self._refusals[manifest] = error
            self.refused[error.kind] += 1
            log.warning("a draft release is not used (%s): %s", error.kind, error)


# --- manifests


def manifest_digest(signed: bytes) -> str:
    """Return the SHA-256 of a manifest's signed part, by which it is remembered: anyone can change the rest."""
    with contextlib.suppress(DecodeError):
        signed = pb.SignedManifest.FromString(signed).manifest or signed
    return hashlib.sha256(signed).hexdigest()


def check(signed: bytes, keys: Mapping[str, bytes], target: TargetIdentity, floor: int) -> pb.Manifest:
    """Return the manifest of a release that may be fetched. Raises ReleaseRefused.

    keys: id -> raw public key of the trusted publishers. floor: no older version is taken.
    """
    try:
        manifest = manifests.verify(signed, keys)
    except ModelRefused as error:
        raise ReleaseRefused("signature", str(error)) from error
    except BadRequest as error:
        raise ReleaseRefused("manifest", str(error)) from error

    def refuse(kind: RefusalKind, wrong: str) -> NoReturn:
        raise ReleaseRefused(kind, f"release {name_of(manifest)[:12]} (version {manifest.version}) {wrong}")

    if manifest.weights_hash != target.weights_hash:
        theirs, ours = manifest.weights_hash[:24], target.weights_hash[:24]
        wrong = f"drafts for a target with the weights {theirs}, this one's are {ours}"
        refuse("target", f"{wrong}; publish it for that target, or train one for this")
    if manifest.tokenizer_hash != target.tokenizer_hash:
        theirs, ours = manifest.tokenizer_hash[:24], target.tokenizer_hash[:24]
        wrong = f"was made for the tokenizer {theirs}, the target's is {ours}"
        refuse("tokenizer", f"{wrong}; export it with the target's own tokenizer")
    if manifest.version < floor:
        wrong = f"is older than version {floor}, which this device has loaded as stable"
        refuse("version", f"{wrong}; to go back to an old draft publish its file as a new version")
    if manifest.size > MAX_BYTES:
        refuse("size", f"has {manifest.size} bytes, this device takes at most {MAX_BYTES}; quantise it further")
    return manifest
