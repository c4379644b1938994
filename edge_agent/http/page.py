"""The chat page: one file, which asks this server and nobody else."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

from starlette.responses import Response


def page() -> Response:
    """Its tokens are coloured by who wrote them; acceptance and round trip are plotted while they come."""
    html, policy = _page()
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


@functools.cache
def _page() -> tuple[str, str]:
    """The file, and the policy that lets run what stands in it and nothing that a text could bring."""
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return html, (
        f"default-src 'none'; script-src {_hash('script', html)}; style-src {_hash('style', html)}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(element: str, html: str) -> str:
    """Of the one element of this name, as a policy's source."""
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
