"""Answer operators: show and steer verifiers, sessions, tenants, windows and releases.

Everything inbound is held against a bound. Every call raises Unavailable while the store is away.
"""

from __future__ import annotations

import logging
import re
import time

from coordinator.api.authentication import tenant_name
from coordinator.api.services import Servicer, rpc, session_id, verifier_id
from coordinator.config import SESSION_MS, TICKET_MS
from coordinator.store import quotas
from outrider.core.errors import BadRequest, NotFound
from outrider.core.text import short_id
from outrider.wire.bounds import at_most
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc as stubs

log = logging.getLogger(__name__)

CORDON_MS = 30 * 86_400_000
"""Milliseconds for which a cordon outlives its verifier."""
SESSIONS_AT_ONCE = 256
"""Sessions that are read at once, so that nobody waits long for Redis."""
MAX_SCANNED = 10_000
"""Sessions looked at for one page: a tenant with few of them is found over several pages."""
DEFAULT_PAGE = 500
MAX_PAGE = 1_000
"""Entries of one answer: half a megabyte."""
MAX_LEVELS = 4_096
"""Levels of a window's bounds: no session's limits are wider."""
MAX_DRAFT_WAIT_MS = 60_000.0
"""Draft wait of a pinned window."""
MAX_PER_LEVEL = 16.0
"""Nodes per level of a pinned window."""
_HASH_BEGINNING = re.compile(r"(sha256:)?[0-9a-f]{1,64}")
_VERIFIER_ACTIONS = {
    pb.VERIFIER_ACTION_CORDON: "cordon",
    pb.VERIFIER_ACTION_UNCORDON: "uncordon",
    pb.VERIFIER_ACTION_DRAIN: "drain",
}


class AdminServicer(Servicer, stubs.AdminServicer):
    """The calls of operators, who have the admin token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._started = time.monotonic()

    @rpc
    async def ListVerifiers(self, request: pb.ListVerifiersRequest) -> pb.ListVerifiersResponse:
        """Return one verifier, or a page of all. Raises NotFound."""
        limit = _limit(request.limit)
        after = verifier_id(request.after, "after") if request.after else ""
        ids, wanted = [*await self.verifiers.fleet()], request.verifier_id
        if wanted and verifier_id(wanted) not in ids:
            raise _no_verifier(wanted)
        following = [name for name in ids if name > after and wanted in ("", name)]
        return pb.ListVerifiersResponse(
            verifiers=await self.verifiers.find(following[:limit]),
            next=following[limit - 1] if len(following) > limit else "",
            total=len(ids),
            store=self.store.name,
            uptime_s=time.monotonic() - self._started,
            lost_s=await self.verifiers.lost(),
        )

    @rpc
    async def UpdateVerifier(self, request: pb.UpdateVerifierRequest) -> pb.UpdateVerifierResponse:
        """Cordon, uncordon or drain a verifier. Raises NotFound."""
        action = _VERIFIER_ACTIONS.get(request.action)
        if action is None:
            raise BadRequest.bound("action", request.action, "CORDON, UNCORDON or DRAIN")
        name = verifier_id(request.verifier_id)
        if not await self.verifiers.update(name, action, keep_ms=CORDON_MS):
            raise _no_verifier(name)
        log.info("%s of verifier %s by an operator", action, name)
        return pb.UpdateVerifierResponse(verifier=next(iter(await self.verifiers.find([name])), None))

    @rpc
    async def ListSessions(self, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
        """Return one session that holds a place, or a page of them by verifier and id. Raises NotFound."""
        of_verifier = verifier_id(request.verifier_id) if request.verifier_id else ""
        tenant = tenant_name(request.tenant) if request.tenant else ""
        after = "", ""
        if request.after:
            last_verifier, _, last_session = request.after.partition("/")
            after = verifier_id(last_verifier, "after"), session_id(last_session, "after")
        limit, default_bounds = _limit(request.limit), await self.sessions.default_bounds()
        if request.session_id:
            one = session_id(request.session_id)
            found = await self.sessions.find((name, one) for name in await self.sessions.verifiers_of(one))
            if not found:
                raise _no_session(one)
            return pb.ListSessionsResponse(sessions=found[:1], total=1, default_bounds=default_bounds)
        ids = [*await self.verifiers.fleet()]
        if of_verifier and of_verifier not in ids:
            raise _no_verifier(of_verifier)
        names = [of_verifier] if of_verifier else ids
        found, following = await self._page([name for name in names if name >= after[0]], tenant, after, limit)
        total = await self.sessions.count(names)
        return pb.ListSessionsResponse(sessions=found, next=following, total=total, default_bounds=default_bounds)

    @rpc
    async def UpdateSession(self, request: pb.UpdateSessionRequest) -> pb.UpdateSessionResponse:
        """End a session for good, or bound its window; without an id, the windows of all sessions without bounds of
        their own. Raises NotFound or BadRequest."""
        match request.action:
            case pb.SESSION_ACTION_KILL:
                name = session_id(request.session_id)
                verifier_ids = await self.sessions.kill(name, keep_ms=SESSION_MS, ticket_ms=TICKET_MS)
                if not verifier_ids:
                    raise _no_session(name)
                log.info("session %s on verifier %s was killed by an operator", short_id(name), verifier_ids[0])
                return pb.UpdateSessionResponse(verifier_id=verifier_ids[0])
            case pb.SESSION_ACTION_BOUND:
                of = session_id(request.session_id) if request.session_id else ""
                bounds = _checked(request.bounds) if request.HasField("bounds") else None
                if not self.config.window_control:
                    raise BadRequest("this coordinator leaves windows to its verifiers (window_control is off)")
                if not await self.sessions.set_bounds(of, bounds):
                    raise _no_session(of)
                return pb.UpdateSessionResponse()
        raise BadRequest.bound("action", request.action, "KILL or BOUND")

    @rpc
    async def ListTenants(self, request: pb.ListTenantsRequest) -> pb.ListTenantsResponse:
        after = tenant_name(request.after, "after") if request.after else ""
        found, following = await self.tenants.listed(after, _limit(request.limit))
        anonymous = await self.authenticator.admits_anybody()
        return pb.ListTenantsResponse(tenants=found, next=following, anonymous=anonymous)

    @rpc
    async def UpdateTenant(self, request: pb.UpdateTenantRequest) -> pb.UpdateTenantResponse:
        """Create a tenant, set its limits or revoke its key. Raises NotFound or BadRequest."""
        name, limits = request.name, _limits(request.limits)
        match request.action:
            case pb.TENANT_ACTION_CREATE:
                tenant, key = await self.tenants.create(name, limits)
                return pb.UpdateTenantResponse(tenant=tenant, key=key)
            case pb.TENANT_ACTION_SET_LIMITS:
                tenant = await self.tenants.set_limits(name, limits, afresh=request.defaults)
                return pb.UpdateTenantResponse(tenant=tenant)
            case pb.TENANT_ACTION_REVOKE:
                return pb.UpdateTenantResponse(tenant=await self.tenants.revoke(name))
        raise BadRequest.bound("action", request.action, "CREATE, SET_LIMITS or REVOKE")

    @rpc
    async def ListReleases(self, request: pb.ListReleasesRequest) -> pb.ListReleasesResponse:
        serial, found = await self.releases.releases(_hash_beginning(request.release) if request.release else "")
        return pb.ListReleasesResponse(releases=found, serial=serial)

    @rpc
    async def UpdateRelease(self, request: pb.UpdateReleaseRequest) -> pb.UpdateReleaseResponse:
        if request.action == pb.RELEASE_ACTION_PUBLISH:
            return pb.UpdateReleaseResponse(release=await self.releases.publish(request.manifest))
        if not request.action or request.action not in pb.ReleaseAction.values():
            raise BadRequest.bound("action", request.action, "PUBLISH, PROMOTE, ROLL_BACK, PIN or UNPIN")
        release = await self.releases.apply(_hash_beginning(request.release), request.action)
        return pb.UpdateReleaseResponse(release=release)

    async def _page(
        self, verifier_ids: list[str], tenant: str, after: tuple[str, str], limit: int
    ) -> tuple[list[pb.SessionStatus], str]:
        """Return a page of the sessions of a tenant ("": of any) on these verifiers, from the one after `after`, and
        the cursor of the next page; "" at the end."""
        found: list[pb.SessionStatus] = []
        scanned = 0
        for name in verifier_ids:
            rest = [(name, held) for held in await self.sessions.held_by(name) if (name, held) > after]
            for start in range(0, len(rest), SESSIONS_AT_ONCE):
                batch = rest[start : start + SESSIONS_AT_ONCE]
                for session in await self.sessions.find(batch):
                    if tenant in ("", session.telemetry.tenant):
                        found.append(session)
                    if len(found) == limit:
                        return found, f"{name}/{session.telemetry.session_id}"
                scanned += len(batch)
                if scanned >= MAX_SCANNED:
                    return found, "/".join(batch[-1])
        return found, ""


def _limits(limits: pb.TenantLimits) -> pb.TenantLimits:
    """Return the limits that are to be set. Raises BadRequest for what is too much."""
    for field, value in limits.ListFields():
        at_most(f"limits.{field.name}", value, getattr(quotas.GREATEST, field.name))
    return limits


def _checked(bounds: pb.WindowBounds) -> pb.WindowBounds:
    """Return the bounds. Raises BadRequest for what no window can have."""
    window = bounds.window
    at_most("bounds.window.depth", window.depth, MAX_LEVELS)
    if window.k > window.depth:
        most = f"at most bounds.window.depth, {window.depth}: a step takes no more levels than there are"
        raise BadRequest.bound("bounds.window.k", window.k, most)
    wait_ms, per_level = window.draft_wait_ms, window.nodes_per_level
    if window.HasField("draft_wait_ms") and not 0.0 <= wait_ms <= MAX_DRAFT_WAIT_MS:
        raise BadRequest.bound("bounds.window.draft_wait_ms", wait_ms, f"between 0 and {MAX_DRAFT_WAIT_MS}")
    if window.HasField("nodes_per_level") and not 1.0 <= per_level <= MAX_PER_LEVEL:
        raise BadRequest.bound("bounds.window.nodes_per_level", per_level, f"between 1 and {MAX_PER_LEVEL}")
    return bounds


def _hash_beginning(value: str) -> str:
    """Return the beginning of a release's hash. Raises BadRequest for anything else."""
    if not _HASH_BEGINNING.fullmatch(value):
        raise BadRequest.bound("release", repr(value[:80]), "1 to 64 hex digits, the beginning of the hash of its file")
    return value


def _limit(limit: int) -> int:
    """Return the entries of a page; 0 asks for the usual number."""
    at_most("limit", limit, MAX_PAGE)
    return limit or DEFAULT_PAGE


def _no_verifier(name: str) -> NotFound:
    return NotFound(f"no verifier {name} is registered; `outrider verifiers list` shows those that are")


def _no_session(name: str) -> NotFound:
    return NotFound(f"no session {name} has a place; `outrider sessions list` shows those that have")
