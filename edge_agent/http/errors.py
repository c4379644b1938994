"""Answer errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from outrider.core import errors
from outrider.core.errors import TOO_LONG, BadRequest, OutriderError

log = logging.getLogger(__name__)

REASON = "outrider.reason"
"""Key in a request's ASGI scope: why it was refused, without what its user has written."""
_INVALID = "invalid_request_error"
_PROMPT = {TOO_LONG, "prompt", "text", "content"}
"""Fields of the SDK's errors that mean the prompt, which is `messages` in a chat."""


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return JSON in ASCII, so that it may repeat whatever a client has sent, lone surrogates included."""
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return Response(data, status, headers, media_type="application/json")


@dataclass(eq=False)
class ApiError(Exception):
    """Carries an HTTP status and the fields of OpenAI's errors."""

    status: int
    message: str
    type: str = _INVALID
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def reason(self) -> str:
        """Return why, for the log: the message may repeat what a user has written, code and field cannot."""
        return f"{self.code or self.type}{f' ({self.param})' if self.param else ''}"

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def refused(scope: MutableMapping[str, Any], error: ApiError) -> Response:
    """Return the response to a request, and leave the reason in its scope for the log."""
    scope[REASON] = error.reason
    return error.response()


def unsupported(param: str, why: str = "") -> ApiError:
    """Return the error for a field that would change the answer and that this server ignores."""
    message = f"{param} is not supported by this server{why}; leave it out"
    return ApiError(400, message, param=param, code="unsupported_parameter")


def invalid_value(param: str | None, message: str) -> ApiError:
    """Return the error for a field whose value is wrong. param: None for the body as a whole."""
    return ApiError(400, message, param=param, code="invalid_value")


def invalid_body(found: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the first of the errors that pydantic finds in a body."""
    if not found:
        return invalid_value(None, "the body cannot be read")
    first = found[0]
    if first["type"] == "json_invalid":
        return invalid_value(None, f"the body is no JSON: {first['ctx']['error']} at character {first['loc'][1]}")
    within = first["loc"][1:]
    if not within:
        return invalid_value(None, "the body must be a JSON object, sent with `content-type: application/json`")
    return invalid_value(str(within[0]).partition("[")[0], f"{_path(within)}: {first['msg']}")


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
    """Return the answer to an error. chat: in a chat's request. Unexpected errors are logged, and not shown."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, OutriderError):
        log.error("a request failed", exc_info=error)
        return ApiError(500, "the server failed; its log says why", "server_error", code="internal_error")
    known = errors.known(error)
    status, kind, code = errors.ANSWERS[known].http
    if known is BadRequest:
        code = "context_length_exceeded" if error.field == TOO_LONG else code
        return ApiError(status, str(error), kind, _param(error.field, chat), code)
    message, headers = str(error), {}
    if isinstance(error, errors.TimedOut) and error.seconds:
        what = "no token came within" if error.first_token else "the request took longer than"
        message = f"{what} {error.seconds:g} s, which is all that this server gives it"
    elif isinstance(error, errors.Unauthenticated | errors.PermissionDenied):
        message = f"the cluster refuses this device: {error}"  # the key is this server's, not its client's
    elif error.retry_after_s > 0:
        headers = {"retry-after": str(math.ceil(error.retry_after_s))}
    return ApiError(status, message, kind, code=code, headers=headers)


def _param(field: str, chat: bool) -> str | None:
    """Return the request's own name of a field of the SDK."""
    if field in _PROMPT:
        return "messages" if chat else "prompt"
    if chat and field == "logprobs":
        return "top_logprobs"
    return "logit_bias" if field.endswith("in logit_bias") else field or None
