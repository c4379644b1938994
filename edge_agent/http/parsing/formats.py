"""Know how each family of models writes reasoning and tool calls: a table, for those who read and for the grammar."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Literal, get_args

ToolFormat = Literal[
    "hermes", "qwen3-coder", "glm", "minimax", "gemma", "llama3", "mistral", "deepseek", "harmony", "json"
]
TOOL_FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)

CALL_ID = "[CALL_ID]"
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
"""The marks of gpt-oss, whose messages on channels are no calls between marks."""
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))


@dataclass(frozen=True)
class Parameters:
    """Arguments that stand one after the other between marks: strings as they are, other values as JSON."""

    before_key: str
    after_key: str
    after_value: str
    after_key_of_json: str = ""
    """What stands in the place of `after_key` before a value that is no string; "" for the same."""


@dataclass(frozen=True)
class CallForm:
    """The form of a call: its opening, its name and its arguments between texts, and its closing.

    The texts are as a chat template writes them. Who reads takes any white space, or none, for a line's end.
    """

    opening: str = ""
    closing: str = ""
    separator: str | None = None
    """What stands between calls that share opening and closing; None: each has its own."""
    key: str = ""
    """Not empty: a call is a JSON object with `name` and this key, and the next four fields mean nothing."""
    before_name: str = ""
    after_name: str = ""
    arguments: Parameters | str = ""
    """"" for a JSON object; a text for an object whose keys stand bare, and whose strings stand between two of it."""
    after_arguments: str = ""
    telltale: str = ""
    """A text in the source of the chat templates that mean this form of their family."""

    @property
    def marker(self) -> str:
        """Return the text by which calls are found; "" for those that are the whole answer."""
        return self.opening.rstrip("\n[")


JSON = CallForm(key="arguments", separator=", ")
_PARAMETER = Parameters('<parameter name="', '">', "</parameter>\n")
_MINIMAX = CallForm(
    opening="<minimax:tool_call>\n", before_name='<invoke name="', after_name='">\n', arguments=_PARAMETER,
    after_arguments="</invoke>", separator="\n", closing="\n</minimax:tool_call>",
)  # fmt: skip
_DSML = CallForm(
    opening="<｜DSML｜function_calls>\n", before_name='<｜DSML｜invoke name="', after_name='">\n',
    arguments=Parameters(
        '<｜DSML｜parameter name="', '" string="true">', "</｜DSML｜parameter>\n", '" string="false">'
    ),
    after_arguments="</｜DSML｜invoke>", separator="\n", closing="\n</｜DSML｜function_calls>",
    telltale="function_calls>",
)  # fmt: skip
_DEEPSEEK = CallForm(
    opening="<｜tool▁calls▁begin｜>", before_name="<｜tool▁call▁begin｜>", after_name="<｜tool▁sep｜>",
    after_arguments="<｜tool▁call▁end｜>", separator="", closing="<｜tool▁calls▁end｜>",
)  # fmt: skip

FORMS: Mapping[ToolFormat, tuple[CallForm, ...]] = {
    "hermes": (CallForm(opening="<tool_call>\n", key="arguments", closing="\n</tool_call>"),),
    "qwen3-coder": (
        CallForm(
            opening="<tool_call>\n", before_name="<function=", after_name=">\n",
            arguments=Parameters("<parameter=", ">\n", "\n</parameter>\n"),
            after_arguments="</function>", closing="\n</tool_call>",
        ),
    ),
    "glm": (
        CallForm(
            opening="<tool_call>", after_name="\n",
            arguments=Parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"), closing="</tool_call>",
        ),
    ),
    "minimax": (_MINIMAX,),
    "gemma": (
        CallForm(
            opening="<start_function_call>", before_name="call:", arguments="<escape>", closing="<end_function_call>",
            telltale="<start_function_call>",
        ),
        CallForm(opening="<|tool_call>", before_name="call:", arguments='<|"|>', closing="<tool_call|>"),
    ),
    "llama3": (CallForm(opening="<|python_tag|>", key="parameters", separator="; "),),
    "mistral": (
        CallForm(opening="[TOOL_CALLS]", after_name="[ARGS]", telltale="[ARGS]"),
        CallForm(opening="[TOOL_CALLS][", key="arguments", separator=", ", closing="]"),
    ),
    "deepseek": (
        replace(
            _DEEPSEEK, before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", after_name="\n```json\n",
            after_arguments="\n```<｜tool▁call▁end｜>", separator="\n", telltale="```json",
        ),
        _DSML,
        replace(
            _DSML, opening="<｜DSML｜tool_calls>\n", closing="\n</｜DSML｜tool_calls>", telltale="｜DSML｜",
        ),
        _DEEPSEEK,
    ),
    "harmony": (JSON,),
    "json": (JSON,),
}  # fmt: skip
"""The forms of each family; where no telltale is in a template, it means the last one."""
BARE: Collection[ToolFormat | None] = ("llama3", "json")
"""Families whose answer may begin with a call as JSON, without any mark."""
_TELLTALES: tuple[tuple[str, ToolFormat], ...] = (
    (CHANNEL, "harmony"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("｜DSML｜", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<minimax:tool_call>", "minimax"),
    ("<function=", "qwen3-coder"),
    ("<arg_key>", "glm"),
    ("<|tool_call>", "gemma"),
    ("<start_function_call>", "gemma"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ("<|start_header_id|>", "llama3"),
)
"""Texts in a chat template's source, and the family that the first of them stands for."""


@dataclass(frozen=True)
class AnswerFormat:
    """The form in which a target writes tool calls and reasoning."""

    tools: ToolFormat | None
    """None: tool calls are not looked for."""
    reasoning: tuple[str, str] | None
    """The texts around reasoning, which comes first; None if there is none. Harmony has channels instead."""
    template: str = ""
    """The source of the target's chat template."""

    @classmethod
    def of(cls, template: str, chosen: str = "auto") -> AnswerFormat:
        """Return the format that a chat template's source speaks of; "json" where it speaks of none.

        chosen: one of TOOL_FORMATS takes precedence, "auto" does not; "none" takes all text as content.
        """
        if chosen == "none":
            return cls(None, None)
        found: ToolFormat = next((tools for text, tools in _TELLTALES if text in template), "json")
        tools = next((one for one in TOOL_FORMATS if one == chosen), found)
        return cls(tools, next((pair for pair in _REASONING if pair[1] in template), None), template)

    @property
    def call(self) -> CallForm:
        """Return the one form in which this target's template writes calls; harmony has its own around the JSON."""
        forms = FORMS[self.tools or "json"]
        return next((one for one in forms if one.telltale and one.telltale in self.template), forms[-1])

    @property
    def forms(self) -> list[CallForm]:
        """Return the forms in which calls are read: those of the family, and others with the same marker."""
        own = FORMS[self.tools] if self.tools is not None else ()
        markers = {one.marker for one in own}
        return [one for forms in FORMS.values() for one in forms if one.marker in markers]

    def markers(self, special: Collection[str], *, calls: bool) -> set[str]:
        """Return the special tokens, by their texts, that a parser needs to see. calls: whether it reads tool calls."""
        texts = [*(self.reasoning or ()), *(HARMONY if self.tools == "harmony" else ()), CALL_ID]
        for part in (part for form in self.forms for part in astuple(form) if calls):
            texts += part if isinstance(part, tuple) else [part or ""]
        return {one for one in special if one and any(one in text for text in texts)}
