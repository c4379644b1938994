"""Check the bodies of requests: honour some fields, refuse others by name, and ignore the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    PrivateAttr,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from edge_agent.http.errors import invalid_value, unsupported
from edge_agent.sdk.types import Options
from edge_agent.target.chat_template import Message
from outrider.core.sampling import MAX_BIAS

MAX_CHOICES = 64
"""Most choices of one request, over all its prompts."""
_MAX_TOOLS = 128
_MAX_TOOL_BYTES = 1 << 16
"""Largest definition of one tool, and the largest arguments of one call, as JSON."""
_MAX_VARIABLES_BYTES = 1 << 14
"""Largest `chat_template_kwargs`, as JSON."""
_MAX_DEPTH = 32
"""Most levels of lists and objects in a schema."""
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "chat_template", "truncate_prompt_tokens", "web_search_options"), ()),
    **dict.fromkeys(("prompt_embeds", "prompt_logprobs", "structural_tag"), ()),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "documents", "functions", "logits_processors", "tools"), ([],)),
    **dict.fromkeys(("include_stop_str_in_output", "use_beam_search"), (False,)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    **dict.fromkeys(("grammar", "suffix"), ("",)),
    **dict.fromkeys(("chat_template_kwargs", "json_schema"), ({},)),
    "best_of": (1,),
    "skip_special_tokens": (True,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
}
"""Fields that would change the answer, with the values, besides null, that change nothing."""
ALL_TOKENS, RANDOM_SEED = -1, -1
"""What stands for no limit and for a random seed, as in llama.cpp and vLLM."""
LEAST_TEMPERATURE = 1e-3
"""Any lower temperature but 0 is greedy, too; so is a top_p of 0."""
_KNOWN = frozenset(
    {"guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar"}
    | {"metadata", "prompt_cache_key", "prompt_cache_retention", "priority", "request_id", "safety_identifier"}
    | {"service_tier", "store", "user", "verbosity"}
)
"""Fields without a type of their own that are honoured, by `answer_grammar`, or change no answer."""
_OF_ROLES: Mapping[str, set[str]] = {
    "assistant": {"role", "name", "tool_calls", "function_call", "refusal"},
    "tool": {"role", "name", "tool_call_id"},
    "function": {"role", "name", "tool_call_id"},
}
"""What of a message its template gets beside the content."""
_FIELD = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def _integral(value: object) -> object:
    """Accept 16.0 as an integer: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def json_problem(value: object, most_bytes: int) -> str:
    """Return what is wrong with a JSON value that is nested too deeply or too large; "" if nothing is."""
    level, depth = [value], 0
    while level := [member for one in level for member in _members(one)]:
        depth += 1
        if depth > _MAX_DEPTH:
            return f"is nested more than {_MAX_DEPTH} levels deep"
    size = len(json.dumps(value))
    return f"has {size} bytes as JSON, must have at most {most_bytes}" if size > most_bytes else ""


def _members(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _refused(problem: str) -> None:
    """Let pydantic refuse a value that has a problem, if it has one."""
    if problem:
        raise PydanticCustomError("outrider", problem)  # no text of a caller's


def _checked_variables(variables: dict[str, Any]) -> dict[str, Any]:
    _refused(json_problem(variables, _MAX_VARIABLES_BYTES))
    if clashing := {"messages", "tools", "add_generation_prompt", "continue_final_message"} & variables.keys():
        _refused(f"has {min(clashing)!r}, which the request's own fields set")
    return variables


def _arguments_text(arguments: object) -> object:
    """Return a call's arguments as the text that they should be, where a client sends the object, or nothing."""
    return "" if arguments is None else json.dumps(arguments) if isinstance(arguments, dict) else arguments


def _checked_arguments(text: str) -> str:
    """Refuse arguments that are nested too deeply. What is no JSON is refused with the message's place later."""
    try:
        arguments = json.loads(text)
    except ValueError:
        return text
    except RecursionError as error:
        raise PydanticCustomError("outrider", "is nested too deeply") from error
    _refused(json_problem(arguments, _MAX_TOOL_BYTES))
    return text


JsonInteger = Annotated[int, BeforeValidator(_integral)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class StreamOptions(BaseModel, extra="allow", strict=True):
    include_usage: bool | None = None
    """Whether each chunk has the field `usage`, and the last one a value in it."""
    continuous_usage_stats: bool | None = None
    """Whether each chunk has the usage so far; only with `include_usage`."""


class RequestBody(BaseModel, extra="allow", strict=True):
    """Holds the fields that both kinds of completions share. Unknown ones are ignored; null is as if missing."""

    model: str | None = None
    max_tokens: JsonInteger | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[JsonInteger, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: JsonInteger | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: JsonInteger | None = None
    min_p: float | None = None
    repetition_penalty: Annotated[
        float | None, Field(validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"))
    ] = None
    stop_token_ids: list[JsonInteger] | None = None
    ignore_eos: bool | None = None
    min_tokens: JsonInteger | None = None
    speculation: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    """What the output follows, as vLLM has it: `json`, `json_object`, `regex`, `choice` or `grammar`."""
    traffic_class: str | None = None
    acceptance_rule: Literal["coupled", "typical"] | None = None
    """Which draft tokens are accepted; with "typical" the answer is lossy."""
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    provenance: bool | None = None
    """Whether each chunk lists its tokens with their provenance."""
    _notes: list[str] = PrivateAttr(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Return what is ignored within the fields that this server knows; `answer_grammar` adds to it."""
        return self._notes

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def least_tokens(self) -> int:
        return 1

    def refuse_unsupported(self) -> None:
        """Raise ApiError for a field that this server cannot honour, by its name."""
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED and value is not None and value not in _UNSUPPORTED[name]:
                raise unsupported(name)
        if (limit := self.token_limit()) is not None and limit < self.least_tokens and limit != ALL_TOKENS:
            raise invalid_value("max_tokens", f"max_tokens is {limit}, must be at least {self.least_tokens}")
        if self.stream_options is not None and not self.stream:
            raise invalid_value("stream_options", "stream_options is only for stream=true")

    @property
    def ignored(self) -> str:
        """Return the names of the fields that this server does not know, a list with commas; most are misspelt."""
        return ", ".join(name if _FIELD.fullmatch(name) else "..." for name in self.unknown())[:200]

    def unknown(self) -> list[str]:
        given = (name for name, value in (self.model_extra or {}).items() if value is not None)
        return [name for name in given if name not in _UNSUPPORTED and name not in _KNOWN]

    def options(self, choice: int) -> Options:
        """Return the SDK's options for the choice of this index, whose seed differs; the defaults are OpenAI's."""
        same = RequestBody.model_fields.keys() & Options.__annotations__.keys() - {"logit_bias", "seed"}
        given: Any = {name: value for name in same if (value := getattr(self, name)) is not None}
        limit = self.token_limit()
        options: Options = {"temperature": 1.0} | given | {"max_tokens": None if limit == ALL_TOKENS else limit}
        if self.top_k == -1:
            options["top_k"] = 0
        if self.top_p == 0.0 or 0.0 < options["temperature"] < LEAST_TEMPERATURE:
            options |= {"temperature": 0.0, "top_p": 1.0}
        if self.logit_bias:
            options["logit_bias"] = {
                _id(token): max(min(value, MAX_BIAS), -MAX_BIAS) for token, value in self.logit_bias.items()
            }
        if (alternatives := self.alternatives()) is not None:
            options["logprobs"] = alternatives
        if self.seed is not None and self.seed != RANDOM_SEED:
            options["seed"] = (self.seed + choice) % 2**64
        return options

    def token_limit(self) -> int | None:
        return self.max_tokens

    def alternatives(self) -> int | None:
        """Return how many alternatives each token's log-probability comes with; None for no log-probabilities."""
        return None


def _id(token: str) -> int:
    if not (token.isascii() and token.isdecimal()) or len(token) > 10:
        raise invalid_value("logit_bias", f"logit_bias has the key {token[:40]!r}, must be a token id")
    return int(token)


class CompletionRequest(RequestBody):
    """The body that POST /v1/completions takes."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: JsonInteger | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts, of which there is at least one unless the body is wrong."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    @property
    def least_tokens(self) -> int:
        return 0 if self.echo else 1

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    def options(self, choice: int) -> Options:
        """Return the SDK's options. To generate nothing takes a prompt that is scored, whether that is told or not."""
        options = super().options(choice)
        if self.echoes_logprobs or (self.echo and self.max_tokens == 0):
            options["prompt_logprobs"] = self.logprobs or 0
        return options

    def token_limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    def alternatives(self) -> int | None:
        return self.logprobs

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if not 1 <= len(self.prompts) * self.choices <= MAX_CHOICES:
            product = f"{len(self.prompts)} x {self.choices}"
            raise invalid_value("prompt", f"prompts times n are {product}, must be between 1 and {MAX_CHOICES}")


class FunctionDefinition(BaseModel, extra="allow", strict=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        _refused(json_problem(self.model_dump(), _MAX_TOOL_BYTES))
        kind = (self.parameters or {}).get("type", "object")
        if kind is None or (isinstance(kind, list) and "object" in kind):
            self.parameters = {**(self.parameters or {}), "type": "object"}
        return self


class ToolDefinition(BaseModel, extra="allow", strict=True):
    type: str
    function: FunctionDefinition | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it, a JSON schema of a function."""
        function = self.function.model_dump(exclude={"strict"}) if self.function is not None else {}
        return {"type": "function", "function": {name: one for name, one in function.items() if one is not None}}


class CalledFunction(BaseModel, extra="allow", strict=True):
    name: FunctionName
    arguments: Annotated[
        str, BeforeValidator(_arguments_text), Field(max_length=_MAX_TOOL_BYTES), AfterValidator(_checked_arguments)
    ] = ""


class CalledTool(BaseModel, extra="allow", strict=True):
    id: str | None = None
    type: Literal["function"] | None = "function"
    function: CalledFunction


class ContentPart(BaseModel, extra="allow", strict=True):
    """A part of a content: text, or something else that is refused."""

    type: str
    text: str | None = None
    refusal: str | None = None
    """Text, too."""


class ChatMessage(BaseModel, extra="allow", strict=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=_MAX_TOOLS)] | None = None
    function_call: CalledFunction | None = None
    """The one call of an assistant, as older clients send it; a message with the role `function` answers it."""
    tool_call_id: str | None = None
    refusal: str | None = None
    """Text of an assistant, too."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same as `reasoning_content`, by its other name."""


class ConversationRequest(RequestBody):
    """Holds the fields that chats and responses share."""

    max_completion_tokens: JsonInteger | None = None
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls; where not, only the first is told."""
    reasoning_effort: ReasoningEffort | None = None
    reasoning_format: Literal["auto", "deepseek", "parsed", "none"] | None = None
    """Where reasoning stands: in `reasoning_content`, for "parsed" in `reasoning`, for "none" in the content."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_checked_variables)] | None = None
    enable_thinking: bool | None = None
    thinking: dict[str, Any] | None = None
    """As Anthropic and DeepSeek have it: its `type` is "disabled" or "enabled"."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Whether the answer goes on with the last message, an assistant's."""


class ChatCompletionRequest(ConversationRequest):
    """The body that POST /v1/chat/completions takes."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: JsonInteger | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @model_validator(mode="after")
    def _plain_choice(self) -> Self:
        """Turn `any` into `required`, and `allowed_tools` into its mode with those tools alone."""
        if self.tool_choice == "any":
            self.tool_choice = "required"
        elif isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == "allowed_tools":
            given = self.tool_choice.get("allowed_tools")
            allowed = given if isinstance(given, dict) else self.tool_choice
            names = [_named_by(one) for one in (allowed["tools"] if isinstance(allowed.get("tools"), list) else ())]
            tools = {tool.function.name: tool for tool in self.tools or () if tool.function is not None}
            if unknown := [name for name in names if name not in list(tools)]:
                self.tool_choice = {"type": "function", "function": {"name": unknown[0]}}  # to be refused by its name
            else:
                self.tools = [tool for name, tool in tools.items() if name in names]
                self.tool_choice = str(allowed.get("mode", "auto"))
        return self

    @property
    def usable_tools(self) -> list[ToolDefinition]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "none", "auto")

    @property
    def named_function(self) -> str | None:
        return self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None

    @property
    def functions(self) -> list[FunctionDefinition]:
        found = [tool.function for tool in self.usable_tools if tool.function is not None]
        return [one for one in found if self.named_function in (None, one.name)]

    @property
    def parameters(self) -> dict[str, dict[str, Any] | None]:
        """Return the parameters' schema of each function that the answer may call, by its name."""
        return {function.name: function.parameters for function in self.functions}

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid_value("top_logprobs", "top_logprobs needs logprobs=true")
        if self.continue_final_message:
            if not self.messages or self.messages[-1].role != "assistant" or not self.messages[-1].content:
                wrong = "continue_final_message needs a last message of the assistant with a text to continue"
                raise invalid_value("continue_final_message", wrong)
            if self.add_generation_prompt:
                wrong = "add_generation_prompt is true, must be false with continue_final_message=true"
                raise invalid_value("add_generation_prompt", wrong)
        elif self.add_generation_prompt is False:
            raise unsupported("add_generation_prompt", " as false without continue_final_message=true")
        self._check_tools()

    def _check_tools(self) -> None:
        """Raise ApiError for tools that are no functions or share a name, and for a choice that is none of them."""
        names: list[object] = []  # `tool_choice` may name a value that has no hash
        for i, tool in enumerate(self.tools or ()):
            if tool.type != "function":
                raise unsupported(f"tools[{i}].type", f" unless it is 'function'; it is {tool.type[:40]!r}")
            if tool.function is None:
                raise invalid_value("tools", f"tools[{i}].function is missing")
            if tool.function.name in names:
                raise invalid_value("tools", f"tools has two functions with the name {tool.function.name!r}")
            names.append(tool.function.name)
            if (kind := (tool.function.parameters or {}).get("type", "object")) != "object":
                wrong = f"the type of {tool.function.name}'s parameters is {str(kind)[:40]!r}, must be 'object'"
                raise invalid_value("tools", wrong)
        choice = self.tool_choice
        if isinstance(choice, dict):
            name = _named_by(choice)
            if choice.get("type") != "function" or name not in names:
                message = f"tool_choice names the function {str(name)[:80]!r}, must name one of the tools"
                raise invalid_value("tool_choice", message)
        elif choice not in (None, "none", "auto", "required"):
            bound = "must be 'none', 'auto', 'required', a function or allowed_tools"
            raise invalid_value("tool_choice", f"tool_choice is {choice[:40]!r}, {bound}")
        elif choice == "required" and not names:
            raise invalid_value("tool_choice", "tool_choice is 'required', and there are no tools")

    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_messages(self) -> list[Message]:
        """Return the messages for the target's template. Raises ApiError naming the one that is unsupported."""
        return [_message(f"messages[{i}]", message) for i, message in enumerate(self.messages)]

    def template_variables(self) -> dict[str, Any]:
        """Return what the template gets beside the messages."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if (thinks := self._thinks()) is not None:
            variables.setdefault("enable_thinking", thinks)  # Qwen's and GLM's name for it
            variables.setdefault("thinking", thinks)  # DeepSeek's
        if self.continue_final_message:
            variables["continue_final_message"] = True
        if self.usable_tools:
            variables["tools"] = [tool.for_template() for tool in self.usable_tools]
        return variables

    def _thinks(self) -> bool | None:
        """Return whether the target should reason first; None to leave it to the template."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if self.thinking is not None and self.thinking.get("type") in ("enabled", "disabled"):
            return bool(self.thinking["type"] == "enabled")
        return False if self.reasoning_effort == "none" else None


def _named_by(choice: object) -> object:
    """Return the name of the function in a choice of a tool; None where there is none."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _message(field: str, message: ChatMessage) -> Message:
    told = message.model_dump(include=_OF_ROLES.get(message.role, {"role", "name"}), exclude_none=True)
    if message.role == "assistant" and (reasoning := message.reasoning_content or message.reasoning):
        told["reasoning_content"] = reasoning
    return {**told, "content": _content(field, message.content)}


def _content(field: str, content: str | list[ContentPart] | None) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content or ()):
        text = {"text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            raise unsupported(f"{field}.content[{i}]", f" unless it is text; its type is {part.type[:40]!r}")
        texts.append(text)
    return "".join(texts)
