"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from edge_agent.sdk.types import TOO_LONG
from outrider.core import errors
from outrider.core.errors import BadRequest, OutriderError

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
_PROMPT = TOO_LONG | {"prompt", "text", "content", "a token id in prompt"}
"""Fields of the SDK's errors that mean what is to be continued, which a request calls by the kind it is of."""
_FIELDS: Mapping[str, str] = {
    "a stop string": "stop",
    "number of stop strings": "stop",
    "a token id in stop_token_ids": "stop_token_ids",
    "number of stop_token_ids": "stop_token_ids",
    "a token id in logit_bias": "logit_bias",
    "a value in logit_bias": "logit_bias",
    "number of ids in logit_bias": "logit_bias",
}
"""Others of them that a request calls otherwise."""


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


def invalid(found: Sequence[Mapping[str, Any]]) -> Problem:
    """The first of what pydantic finds wrong with a body."""
    if not found:
        return Problem(400, "the body cannot be read", code="invalid_value")
    first = found[0]
    if first["type"] == "json_invalid":
        why = f"{first['ctx']['error']} at character {first['loc'][1]}"
        return Problem(400, f"the body is no JSON: {why}", code="invalid_value")
    within = first["loc"][1:]
    if not within:
        return Problem(
            400, "the body must be a JSON object, sent with `content-type: application/json`", code="invalid_value"
        )
    param = str(within[0])
    return Problem(400, f"{_path(within)}: {first['msg']}", param=param, code="invalid_value")


def _path(within: Sequence[int | str]) -> str:
    """As far as the request's own names lead: a type that was tried comes after them."""
    path = ""
    for part in within:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part == "str" or part.startswith("list["):
            break
        else:
            path += f".{part}" if path else part
    return path


def problem_of(error: Exception, *, chat: bool = False) -> Problem:
    """How an error is told, of a chat or of another request. What nobody raised on purpose goes to the log."""
    match error:
        case Problem():
            return error
        case errors.VocabularyMismatch():
            return Problem(500, str(error), "server_error", code="vocabulary_mismatch")
        case errors.ProtocolViolation():
            return Problem(502, str(error), "upstream_error", code="protocol_violation")
        case BadRequest():
            code = "context_length_exceeded" if error.field in TOO_LONG else "invalid_value"
            return Problem(400, str(error), param=_param(error.field, chat), code=code)
        case errors.ModelRefused():
            return Problem(400, str(error), code="model_refused")
        case errors.NotFound():
            return Problem(404, str(error), code="not_found")
        case errors.Killed():
            # No 5xx: clients repeat those by themselves, and the request would be back.
            return Problem(410, str(error), "upstream_error", code="session_killed")
        case errors.Overloaded():
            return Problem(429, str(error), "rate_limit_error", code="overloaded", headers=_later(error.retry_after_s))
        case errors.Unavailable():
            headers = _later(error.retry_after_s)
            return Problem(503, str(error), "service_unavailable_error", code="unavailable", headers=headers)
        case errors.TimedOut() if error.seconds:
            what = "no token came within" if error.first_token else "the request took longer than"
            message = (
                f"{what} {error.seconds:g} s, which is all that this server gives it (outrider-edge serve --timeout)"
            )
            return Problem(504, message, "timeout_error", code="timeout")
        case errors.TimedOut():
            return Problem(504, str(error), "timeout_error", code="timeout")
        case errors.Unauthenticated() | errors.PermissionDenied():
            # This server's key, not its client's.
            return Problem(502, f"the cluster refuses this device: {error}", "upstream_error", code="upstream_refused")
        case OutriderError():
            return Problem(500, str(error), "server_error", code="internal_error")
    log.error("a request failed", exc_info=error)
    return Problem(500, "the server failed; its log says why", "server_error", code="internal_error")


def _param(field: str, chat: bool) -> str | None:
    """The request's name for what the SDK calls so."""
    if field in _PROMPT:
        return "messages" if chat else "prompt"
    if chat and field == "logprobs":
        return "top_logprobs"
    return _FIELDS.get(field, field) or None


def _later(seconds: float) -> dict[str, str]:
    return {"retry-after": str(math.ceil(seconds))} if seconds > 0 else {}
