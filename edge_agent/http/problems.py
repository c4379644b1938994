"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from edge_agent.completion import TOO_LONG
from outrider.core import errors
from outrider.core.errors import BadRequest, OutriderError

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"


class Json(Response):
    """ASCII, so that whatever a client sent can be told back to it, lone surrogates too."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


@dataclass(eq=False)
class Problem(Exception):
    """An answer that is an error."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Json(self.body, self.status, self.headers)


def unsupported(param: str, why: str = "") -> Problem:
    """A field that would change the answer and that this server does not heed."""
    message = f"{param} is not supported by this server{why}; leave it out"
    return Problem(400, message, param=param, code="unsupported_parameter")


def problem_of(error: Exception) -> Problem:
    """How an error is told. What nobody raised on purpose goes to the log."""
    match error:
        case Problem():
            return error
        case BadRequest():
            code = "context_length_exceeded" if error.field in TOO_LONG else "invalid_value"
            return Problem(400, str(error), param=error.field or None, code=code)
        case errors.ModelRefused():
            return Problem(400, str(error), code="model_refused")
        case errors.NotFound():
            return Problem(404, str(error), code="not_found")
        case errors.Overloaded():
            return Problem(429, str(error), "rate_limit_error", code="overloaded", headers=_later(error.retry_after_s))
        case errors.Unavailable():
            headers = _later(error.retry_after_s)
            return Problem(503, str(error), "service_unavailable_error", code="unavailable", headers=headers)
        case errors.TimedOut():
            return Problem(504, str(error), "timeout_error", code="timeout")
        case errors.Unauthenticated() | errors.PermissionDenied():
            # This server's key, not its client's.
            return Problem(502, f"the cluster refuses this device: {error}", "upstream_error", code="upstream_refused")
        case OutriderError():
            return Problem(500, str(error), "server_error", code="internal_error")
    log.error("a request failed", exc_info=error)
    return Problem(500, "the server failed; its log says why", "server_error", code="internal_error")


def _later(seconds: float) -> dict[str, str]:
    return {"retry-after": str(math.ceil(seconds))} if seconds > 0 else {}
