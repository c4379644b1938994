"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from edge_agent.sdk.request import TOO_LONG
from outrider.core import errors
from outrider.core.errors import BadRequest, OutriderError

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
_PROMPT = TOO_LONG | {"prompt", "text", "content"}
"""Fields of the SDK's errors that mean the prompt, which is `messages` in a chat."""
_FIELDS: Mapping[str, str] = {
    "a token id in logit_bias": "logit_bias",
    "a value in logit_bias": "logit_bias",
    "number of ids in logit_bias": "logit_bias",
}
"""Other fields of the SDK's errors that a request has under another name."""


class JsonResponse(Response):
    """JSON in ASCII, so that it may repeat whatever a client has sent, lone surrogates included."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


@dataclass(eq=False)
class ApiError(Exception):
    """An error with its HTTP status and OpenAI's fields."""

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
        return JsonResponse(self.body, self.status, self.headers)


def unsupported(param: str, why: str = "") -> ApiError:
    """Return the error for a field that would change the answer and that this server ignores."""
    message = f"{param} is not supported by this server{why}; leave it out"
    return ApiError(400, message, param=param, code="unsupported_parameter")


def invalid(found: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the first of the errors that pydantic finds in a body."""
    if not found:
        return ApiError(400, "the body cannot be read", code="invalid_value")
    first = found[0]
    if first["type"] == "json_invalid":
        why = f"{first['ctx']['error']} at character {first['loc'][1]}"
        return ApiError(400, f"the body is no JSON: {why}", code="invalid_value")
    within = first["loc"][1:]
    if not within:
        return ApiError(
            400, "the body must be a JSON object, sent with `content-type: application/json`", code="invalid_value"
        )
    param = str(within[0])
    return ApiError(400, f"{_path(within)}: {first['msg']}", param=param, code="invalid_value")


def _path(within: Sequence[int | str]) -> str:
    """Join the request's own names; the types that pydantic has tried come after them."""
    path = ""
    for part in within:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part == "str" or part.startswith("list["):
            break
        else:
            path += f".{part}" if path else part
    return path


def api_error(error: Exception, *, chat: bool = False) -> ApiError:
    """Return an error as a client is told it. chat: of a chat's request. Unexpected errors go to the log."""
    match error:
        case ApiError():
            return error
        case errors.VocabularyMismatch():
            return ApiError(500, str(error), "server_error", code="vocabulary_mismatch")
        case errors.ProtocolViolation():
            return ApiError(502, str(error), "upstream_error", code="protocol_violation")
        case BadRequest():
            code = "context_length_exceeded" if error.field in TOO_LONG else "invalid_value"
            return ApiError(400, str(error), param=_param(error.field, chat), code=code)
        case errors.ModelRefused():
            return ApiError(400, str(error), code="model_refused")
        case errors.NotFound():
            return ApiError(404, str(error), code="not_found")
        case errors.Killed():
            # Not a 5xx: clients repeat those by themselves, and the request would be back.
            return ApiError(410, str(error), "upstream_error", code="session_killed")
        case errors.Overloaded():
            headers = _retry_after(error.retry_after_s)
            return ApiError(429, str(error), "rate_limit_error", code="overloaded", headers=headers)
        case errors.Unavailable():
            headers = _retry_after(error.retry_after_s)
            return ApiError(503, str(error), "service_unavailable_error", code="unavailable", headers=headers)
        case errors.TimedOut() if error.seconds:
            what = "no token came within" if error.first_token else "the request took longer than"
            limit = f"{error.seconds:g} s, which is all that this server gives it (outrider-edge serve --timeout)"
            return ApiError(504, f"{what} {limit}", "timeout_error", code="timeout")
        case errors.TimedOut():
            return ApiError(504, str(error), "timeout_error", code="timeout")
        case errors.Unauthenticated() | errors.PermissionDenied():
            # The key is this server's, not its client's.
            return ApiError(502, f"the cluster refuses this device: {error}", "upstream_error", code="upstream_refused")
        case OutriderError():
            return ApiError(500, str(error), "server_error", code="internal_error")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log says why", "server_error", code="internal_error")


def _param(field: str, chat: bool) -> str | None:
    """Return the request's own name of a field of the SDK."""
    if field in _PROMPT:
        return "messages" if chat else "prompt"
    if chat and field == "logprobs":
        return "top_logprobs"
    return _FIELDS.get(field, field) or None


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(math.ceil(seconds))} if seconds > 0 else {}
