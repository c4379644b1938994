"""The chat page: one file, which asks this server and nobody else."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page() -> Response:
    """Its tokens are coloured by who wrote them; acceptance and round trip are plotted while they come."""
    html = Path(__file__).with_name("page.html").read_bytes()
    headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)
