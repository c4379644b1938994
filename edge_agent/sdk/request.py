"""Check a request's options, prompt and messages before anything is sent. Every check raises BadRequest."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence, Sized
from typing import Annotated, Any, NoReturn, Unpack

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from edge_agent.sdk.types import DEFAULT_RETRIES, DEFAULT_TIMEOUT, AcceptanceRule, Offline, Options, Timeout
from edge_agent.target.chat_template import Message
from outrider.core.errors import TOO_LONG, BadRequest
from outrider.core.protocol.messages import (
    MAX_GENERATED_TOKENS,
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    MAX_PROMPT_TOKENS,
    MAX_STOP_TOKENS,
    Attach,
    sampling_message,
)
from outrider.core.sampling import SamplingParams, TypicalAcceptance
from outrider.wire.bounds import is_label
from outrider.wire.v1.session_pb2 import DescribeResponse

OPEN_END = 4096
"""Tokens that a request whose max_tokens is None asks for at a time, or a quarter of the target's longest sequence if
that is more: a session reserves room for as many tokens as it may generate, and most answers end long before."""
MAX_RETRIES = 100
MAX_STOPS = 64
MAX_STOP_CHARS = 256
DRAWN_SEED_BITS = 53
"""Bits of a seed that is drawn: JavaScript, and whatever reads JSON as it does, rounds larger integers."""
_MAX_SHOWN = 80


def _plain(value: Any) -> Any:
    """Return arrays and numbers of NumPy's or the like as Python's own, also in lists and mappings."""
    if type(value) in (list, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _texts(value: object) -> object:
    return [value] if isinstance(value, str) else [] if value is None else value


def _label(value: str) -> str:
    if not is_label(value):
        raise PydanticCustomError("outrider", "Input should be at most 64 letters, digits, '.', '_' or '-'")
    return value


def _timeout(value: object) -> Timeout:
    """Accept a Timeout, seconds in all, or None for no limit; pydantic checks the fields afterwards."""
    return value if isinstance(value, Timeout) else Timeout(value, None)  # type: ignore[arg-type]


TokenIds = Annotated[tuple[int, ...], Field(strict=False)]
"""Token ids in a list, a tuple or an iterator."""
Integer = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
"""An integer that a message can show; SamplingParams knows its bounds."""


# --- a request


class Request(BaseModel):
    """The options of one request, each within its bounds; `of` makes one from a caller's keyword arguments."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    max_tokens: Annotated[int, Field(ge=0)] | None = 256
    temperature: float = 0.0
    top_k: Integer = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Integer | None = None
    grammar: str = ""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    logit_bias: Annotated[Mapping[Integer, float], Field(strict=False)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...],
        BeforeValidator(_texts),
        Field(max_length=MAX_STOPS, strict=False),
    ] = ()
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKENS)] = ()
    ignore_eos: bool = False
    speculation: bool = True
    traffic_class: Annotated[str, AfterValidator(_label)] = ""
    timeout: Annotated[Timeout, BeforeValidator(_timeout)] = DEFAULT_TIMEOUT
    retries: Annotated[int, Field(ge=0, le=MAX_RETRIES)] = DEFAULT_RETRIES
    offline: Offline = "raise"
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    acceptance_rule: AcceptanceRule = "coupled"
    typical_epsilon: float | None = None
    typical_delta: float | None = None

    _sampling: SamplingParams = PrivateAttr()

    @classmethod
    def of(cls, **options: Unpack[Options]) -> Request:
        """Check a caller's options. Raises BadRequest naming the one that is wrong."""
        if unknown := sorted(set(options) - set(cls.model_fields)):
            raise BadRequest(f"unknown option {unknown[0]!r}; known are {', '.join(sorted(cls.model_fields))}")
        try:
            return cls.model_validate({name: _plain(value) for name, value in options.items()})
        except ValidationError as error:
            raise bad_request(error) from None

    def model_post_init(self, context: Any) -> None:
        """Check the bounds of sampling, which SamplingParams knows. Raises BadRequest."""
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            refuse("max_tokens", 0, "greater than or equal to 1, or come with prompt_logprobs")
        given = {name: value for name, value in self if name in SamplingParams.__dataclass_fields__}
        given["seed"] = secrets.randbits(DRAWN_SEED_BITS) if self.seed is None else self.seed
        given["logit_bias"] = tuple((self.logit_bias or {}).items())
        self._sampling = SamplingParams(**given, typical=self._typical())
        if self.grammar and self.ignore_eos:
            raise BadRequest.bound("ignore_eos", True, "False with a grammar, which says where the output may end")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest.bound("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")

    def _typical(self) -> TypicalAcceptance | None:
        """Return the parameters of typical acceptance, None for another rule. Raises BadRequest."""
        both = {"epsilon": self.typical_epsilon, "delta": self.typical_delta}
        given = {name: value for name, value in both.items() if value is not None}
        if self.acceptance_rule == "typical":
            return TypicalAcceptance(**given)
        for name, value in given.items():
            raise BadRequest.bound(f"typical_{name}", value, 'left out without acceptance_rule="typical"')
        return None

    @property
    def sampling(self) -> SamplingParams:
        """Return the sampling parameters, with the seed that was drawn where the caller gave none."""
        return self._sampling

    def message(self, prompt: Sequence[int], target: DescribeResponse, *, received: int = 0) -> Attach:
        """Return what a session asks for. Raises BadRequest for a prompt or ids that the target cannot take.

        received: tokens that were generated before; without a max_tokens further ones are asked for.
        """
        vocabulary_size, max_sequence = target.vocabulary_size, target.max_sequence
        most = self.max_tokens
        if most is None:
            most = received + max(OPEN_END, max_sequence // 4)
        most = min(most, MAX_GENERATED_TOKENS)
        if max_sequence:
            most = min(most, max(1, max_sequence - len(prompt)))
        _check_length(len(prompt))
        _check_ids("prompt", prompt, vocabulary_size)
        if max_sequence and len(prompt) + most > max_sequence:  # there is no room for one token
            bound = f"at most {max_sequence - most}, since the target holds {max_sequence}"
            raise BadRequest.bound(TOO_LONG, len(prompt), bound)
        _check_scores(len(prompt), self.prompt_logprobs)
        _check_ids("stop_token_ids", self.stop_token_ids, vocabulary_size)
        _check_ids("logit_bias", list(self.logit_bias or ()), vocabulary_size)
        return Attach(
            prompt=prompt,
            sampling=sampling_message(self.sampling),
            max_tokens=most,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            min_tokens=min(self.min_tokens, most),
            prompt_logprobs=self.prompt_logprobs,
            undrafted=not self.speculation,
        )


# --- prompts and messages


_TOKEN_IDS = TypeAdapter[tuple[int, ...]](TokenIds, config=ConfigDict(strict=True))


def check_prompt(prompt: object) -> str | tuple[int, ...]:
    """Return a text, or token ids as a tuple. Raises BadRequest for anything else."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sized):
        _check_length(len(prompt))  # before each is looked at
    try:
        return _TOKEN_IDS.validate_python(_plain(prompt))
    except ValidationError as error:
        raise bad_request(error, "prompt") from None


def check_messages(messages: object) -> tuple[Message, ...]:
    """Return the messages, each a mapping with a role and a content, or with calls of tools. Raises BadRequest."""
    if not isinstance(messages, list | tuple):
        refuse("messages", messages, "a list of messages")
    if not messages:
        raise BadRequest.bound("messages", "empty", "at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            refuse(f"messages[{i}]", message, 'a mapping with "role" and "content"')
        _check_calls(f"messages[{i}].tool_calls", message.get("tool_calls"))
        if (called := message.get("function_call")) is not None:
            _check_calls(f"messages[{i}].function_call", [{"function": called}])
        role, content, refusal = (message.get(key) for key in ("role", "content", "refusal"))
        if not isinstance(role, str):
            refuse(f"messages[{i}].role", role, "a text")
        if not isinstance(refusal, str | None):
            refuse(f"messages[{i}].refusal", refusal, "a text")
        for j, part in enumerate(content if isinstance(content, list | tuple) else ()):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
                refuse(f"messages[{i}].content[{j}]", part, 'a part with the type "text" and its text')
        if not isinstance(content, str | list | tuple) and not (
            content is None and (message.get("tool_calls") or called or refusal)
        ):
            refuse(f"messages[{i}].content", content, "a text or a list of text parts")
    return tuple(messages)


def _check_calls(field: str, calls: object) -> None:
    """Raise BadRequest unless `calls` is None or a list of `{"function": {"name": ..., "arguments": ...}}`."""
    if calls is None:
        return
    for call in calls if isinstance(calls, list | tuple) else (None,):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            refuse(field, calls, 'a list of mappings with a "function", which has a "name"')


def check_variables(variables: object) -> Mapping[str, Any]:
    """Return the variables of a chat template. Raises BadRequest for those that the client itself sets."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        refuse("template", variables, "a mapping of names to JSON values")
    for name in ("messages", "add_generation_prompt"):
        if name in variables:
            refuse(f"template.{name}", variables[name], "left out")
    tools = variables.get("tools") or ()
    for tool in tools if isinstance(tools, list | tuple) else (None,):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
            refuse("template.tools", tools, 'a list of mappings with a "function", which is a JSON schema')
    return variables


def _check_scores(prompt_tokens: int, top: int | None) -> None:
    """Raise BadRequest for a prompt of which too many log-probabilities are asked for. top: alternatives per token."""
    values = 0 if top is None else (prompt_tokens - 1) * (1 + top)
    if values > MAX_PROMPT_LOGPROBS:
        got = f"{prompt_tokens} tokens with {top} alternatives each"
        raise BadRequest.bound("prompt with log-probabilities", got, f"at most {MAX_PROMPT_LOGPROBS} values")


def _check_length(tokens: int) -> None:
    if not tokens:
        raise BadRequest("the prompt is empty, must have at least one token", field="prompt")
    if tokens > MAX_PROMPT_TOKENS:
        raise BadRequest.bound(TOO_LONG, f"{tokens} tokens", f"at most {MAX_PROMPT_TOKENS}")


def _check_ids(field: str, ids: Sequence[int], vocabulary_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary_size:
        wrong = next(i for i in ids if not 0 <= i < vocabulary_size)
        bound = f"between 0 and {vocabulary_size - 1}"
        raise BadRequest(f"a token id in {field} is {wrong}, must be {bound}", field=field)


# --- errors


def bad_request(error: ValidationError, field: str = "") -> BadRequest:
    """Return the first thing that pydantic finds wrong: the option, what it got and what it must be.

    field: the name of a value that is no model's field.
    """
    first = error.errors(include_url=False)[0]
    path = [*([field] if field else []), *first["loc"]]
    name = str(path[0])
    place = name + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
    if path[-1] == "[key]":
        place = f"a key of {name}"
    must = re.sub(r"^\w+ should ", "must ", first["msg"]).partition(" after validation")[0]
    must = must.replace("valid tuple", "list")
    return BadRequest(f"{place} is {_shown(first['input'])}, {must}", field=name)


def refuse(field: str, value: object, bound: str) -> NoReturn:
    """Raise BadRequest with as much of the value as a message can take."""
    raise BadRequest.bound(field, _shown(value), bound)


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except Exception:  # a foreign type's, or an integer of thousands of digits
        return f"a {type(value).__name__}"
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
